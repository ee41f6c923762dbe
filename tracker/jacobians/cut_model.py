"""Run the caller's own model, cut at the boundaries of its blocks: where a block ends, the next one gets the recorded state.

So an error is that of one block. With gradients, each state is a new leaf of the graph: what the model computes from it outside
the block and gives to the block, such as a gate or a second argument, hangs on the leaf; earlier states do not. A model whose
weights are sharded, offloaded or quantized, or that is on another device than the measurement, can't run here (`why_not`); its
replica runs in its place, which shows what reaches a block's output, and not whether the replica computes what the model does.
Cost: a forward pass. Memory with gradients: the graph of one block, and of what precedes block 1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tracker.devices import is_allocation_failure, raise_device_errors
from tracker.linalg.transfer import to_device
from tracker.model.guard import copy_nested
from tracker.model.hidden_state import bind_arguments, hidden_state, with_hidden_state
from tracker.model.inputs import Batch
from tracker.model.random_numbers import Generator, Generators
from tracker.model.recording import Recording
from tracker.model.replica import Replica, StopForward
from tracker.model.twin import twin_of
from tracker.model.weights import is_plain
from tracker.model.wrappers import innermost
from tracker.spans.calls import at_boundaries

TOGETHER = 1 << 17  # numbers of a state up to which all samples run
# Gives boundary l, where the model has this tensor, its state, as (B, n, d)
State = Callable[[int, Tensor], Tensor]
Left = Callable[[int, Tensor], None]  # takes the output (B, n, d) of block l


def why_not(replica: Replica) -> str:
    """Return why the caller's model can't be asked; empty if it can."""
    model = innermost(replica.model)
    weights = [*model.parameters(), *model.buffers()]
    if not all(map(is_plain, weights)):
        return "its weights are sharded, offloaded, quantized or sparse"
    if any(t.is_inference() for t in weights):
        return "its weights were made in inference mode"
    elsewhere = {t.device for t in weights} - {replica.device}
    return (
        f"it is on {elsewhere.pop()} and the measurement on {replica.device}" if elsewhere else ""
    )


def model_bytes(replica: Replica) -> int:
    """Return the bytes of the first floating number among the weights of the caller's model."""
    weights = innermost(replica.model).parameters()
    sizes = (p.itemsize for p in weights if p.is_floating_point())
    return next(sizes, replica.dtype.itemsize)


class CutModel:
    """Passes of the caller's model on a sample or two, with the states set where blocks begin and end.

    A batch that may not divide into samples is run whole.

    Args:
        replica: the replica that was recorded.
        batch: the forward call.
        recording: of this call.
        dtype: that of a copy, a replica of its own that runs in the model's place; None: the model itself runs.
    """

    def __init__(
        self,
        replica: Replica,
        batch: Batch,
        recording: Recording,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.replica = replica
        self.model = innermost(replica.model)
        self.dtype = dtype
        # Called with the number of a block that begins, and the parts of the copy that hold its weights
        self.loaded: Callable[[int, Iterable[nn.Module]], None] = lambda *_: None
        self.calls, self.L = recording.calls, len(recording.calls)
        self.whole = batch
        self.choose_all()
        self.seed = recording.seed or 0
        self.cast = False  # whether the inputs are cast to the dtype of the weights
        self.ended = -1  # blocks that have ended in this pass; -1 before the first begins
        self.first: Tensor | None = (
            None  # the state that this pass computed for block 1, with what it was computed from
        )

    @property
    def divided(self) -> bool:
        """Whether not all samples run."""
        return self.samples != slice(None)

    @property
    def asked(self) -> range:
        """The samples that run."""
        return range(len(self.whole.labels))[self.samples]

    def choose(self, sample: int) -> None:
        """Run all samples, if they are small or may not divide; else this one and another: with one alone a model may differ."""
        self.choose_all()
        if self.whole.divides and self.calls[0].x.numel() > TOGETHER:
            start = max(0, min(sample, len(self.whole.labels) - 2))
            self.samples = slice(start, start + 2)
            self.batch = self.whole.part(self.samples)

    def choose_all(self) -> None:
        """Run all samples."""
        self.batch, self.samples = self.whole, slice(None)

    @staticmethod
    def rows(tokens: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of a row of each sample that runs, on the device of a tensor."""
        both = torch.stack([torch.arange(len(tokens)), torch.tensor(tokens)])
        samples, tokens_there = to_device(like.device, both)[0]
        return samples, tokens_there

    def recorded(
        self, l: int, like: Tensor, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "B n d"]:
        """Return a copy of the recorded state at boundary l, on the device of a tensor, in its dtype or another."""
        state = self.calls[l].x if l < self.L else self.calls[-1].y
        return state[self.samples].to(like.device, dtype or like.dtype, copy=True)

    def gradients(
        self, products: Sequence[Tensor], leaf: Tensor, at: tuple[Tensor, Tensor]
    ) -> tuple[list[Float[Tensor, "B n d"]], Float[Tensor, " B"]]:
        """Return the gradients of products to a block's state; and the size of those to rows of the first state along what was
        computed from it before block 1 began, which the leaf does not reach.
        """
        found = []
        # The mode of boundaries would replace the first state by the leaf
        with torch._C.DisableTorchFunction():
            first = self.first is not None and self.first.requires_grad
            inputs = [leaf, self.first] if first else [leaf]
            for i, product in enumerate(products):
                # What was computed before block 1 began is differentiated once for each block.
                retain = first or i + 1 < len(products)
                found.append(
                    torch.autograd.grad(
                        product,
                        inputs,
                        retain_graph=retain,
                        materialize_grads=True,
                        allow_unused=True,
                    )
                )
        gradients = [of_leaf for of_leaf, *_ in found]
        if not first:
            return gradients, leaf.new_zeros(len(at[0]), dtype=torch.float64)
        beside = sum(self.replica.oriented(of_first)[at] for _, of_first in found)
        return gradients, torch.linalg.vector_norm(beside, dim=-1, dtype=torch.float64)

    def run(self, begin: State, end: Left, last: int) -> None:
        """Run the model up to the end of block `last`."""
        if self.dtype is not None:
            self._run_copy(self.dtype, begin, end, last)
            return
        try:
            self._run_model(begin, end, last)
        except RuntimeError as error:
            if self.cast or is_allocation_failure(error):
                raise
            # A model of bfloat16 weights may take inputs of float32 in training alone, under autocast.
            raise_device_errors(error)
            self.cast = True
            self._run_model(begin, end, last)

    def _run_model(self, begin: State, end: Left, last: int) -> None:
        arguments, keywords = copy_nested(
            (list(self.batch.arguments), self.batch.keywords), self._copied, {}
        )
        generators = Generators(self.replica.device)
        with twin_of(self.model, generators) as twin:
            generators.seed(self.seed)
            with self._hooked(twin.get_submodule, begin, end, last), suppress(StopForward):
                twin(*arguments, **keywords)

    def _run_copy(self, dtype: torch.dtype, begin: State, end: Left, last: int) -> None:
        recorded = self.replica
        copy = Replica(
            recorded.model, recorded.description, dtype, recorded.device, recorded.gather
        )
        arguments, keywords = copy.copy_inputs((self.batch.arguments, self.batch.keywords))

        def load(block: nn.Module, *_: Any) -> None:
            self.loaded(max(self.ended, 0) + 1, block.modules())

        with ExitStack() as stack:
            if recorded.description.spans:
                stack.enter_context(copy.materialize(copy.module))
                self.loaded(1, copy.module.modules())
            else:
                stack.enter_context(copy.stream_blocks(lambda *_: None, lambda *_: None))
                for block in dict.fromkeys(copy.blocks):
                    stack.callback(block.register_forward_pre_hook(load).remove)
            stack.enter_context(self._hooked(copy.module.get_submodule, begin, end, last))
            copy.run(arguments, keywords, self.seed)

    @contextmanager
    def _hooked(
        self, module: Callable[[str], nn.Module], begin: State, end: Left, last: int
    ) -> Iterator[None]:
        """Set states where blocks begin, and take them where blocks end, in a pass of a model whose modules have these names."""
        self.ended, self.first = -1, None
        from_inputs = ExitStack()  # until block 1 begins, what modules return is part of the graph
        oriented = self.replica.oriented

        def leave(found: Tensor) -> Tensor:
            self.ended += 1
            end(self.ended, oriented(found))
            if self.ended == last:
                raise StopForward(None)
            return oriented(begin(self.ended, found))

        def enter(found: Tensor) -> Tensor:
            self.ended = 0
            self.first = found
            from_inputs.close()
            return oriented(begin(0, found))

        spans = self.replica.description.spans
        hooks = {spans[0][0]: enter} | {end: leave for _, end in spans} if spans else {}
        try:
            with (
                from_inputs,
                at_boundaries(module, hooks) if spans else self._at_modules(module, enter, leave),
            ):
                if torch.is_grad_enabled():
                    here = partial(_in_graph, get_ident())
                    from_inputs.callback(register_module_forward_hook(here).remove)
                yield
        finally:
            self.first = None  # with its graph
        if self.ended != last:
            raise RuntimeError(f"hooks saw {max(self.ended, 0)} of its {last} blocks run")

    @contextmanager
    def _at_modules(
        self,
        module: Callable[[str], nn.Module],
        enter: Callable[[Tensor], Tensor],
        leave: Callable[[Tensor], Tensor],
    ) -> Iterator[None]:
        # One may be several
        blocks = [module(name) for name in dict.fromkeys(call.name for call in self.calls)]

        def begin(block: nn.Module, args: tuple, kwargs: dict) -> Any:
            if self.ended >= 0:
                return None
            bound = bind_arguments(block, args, kwargs)
            state = next(iter(bound.arguments.values()))
            new = enter(state)
            # That another argument is the state as well can't be told from a constant in one block; others show it.
            alike = state if self.L == 1 else None
            for i, (name, value) in enumerate(bound.arguments.items()):
                bound.arguments[name] = (
                    new if i == 0 or (value is alike and value is not None) else value
                )
            return bound.args, bound.kwargs

        def end(block: nn.Module, args: tuple, output: Any) -> Any:
            return with_hidden_state(output, leave(hidden_state(output)))

        with ExitStack() as stack:
            stack.callback(
                blocks[0].register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove
            )
            for block in blocks:
                stack.callback(block.register_forward_hook(end).remove)
            yield

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Generator):
            return deepcopy(value)
        if not isinstance(value, Tensor):
            return value
        weights = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        dtype = (
            next(weights, value.dtype) if self.cast and value.is_floating_point() else value.dtype
        )
        copy = value.to(self.replica.device, dtype, copy=True)
        if (
            torch.is_grad_enabled()
            and copy.is_floating_point()
            and copy.numel() == self.calls[0].x[self.samples].numel()
        ):
            return copy.requires_grad_().clone()  # it may be the first state
        return copy


def _in_graph(thread: int, module: nn.Module, args: tuple, output: Any) -> Any:
    """Return a module's output as part of a graph that begins there at the latest: a forward hook, for one thread."""
    if get_ident() != thread or not isinstance(output, Tensor):
        return output
    if output.is_floating_point() and not output.requires_grad:
        return output.detach().requires_grad_().clone()  # a leaf does not allow work in place
    return output
