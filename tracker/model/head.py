"""What a model does with the last block's output: the norm that takes it, and the logits that follow.

A norm is known by its class name next to the blocks (`Blocks.final_norms`) or, in models that are not Hugging Face's, by what
it does: a module without matrices that takes the last block's output itself, returns another tensor of its shape, and the same
one when its input is scaled. The final norm is the one whose output the logits (`tail`) are computed from; of two in a row, both.
Without logits it is the first.

No final norm is a norm inside a module that takes the last block's output and adds to it: that module is a block, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tracker.model.hidden_state import call_on, check_finite, hidden_state
from tracker.model.recording import BlockCall, Recording
from tracker.model.replica import Replica
from tracker.model.state_maps import StateMap, adds, ends, is_alike, may_be_block, state_given
from tracker.model.tail import Tail

SCALES = 4, 16  # of the root mean square: at both, the epsilon of a norm is negligible
SAME = 1e-2  # of the largest entry


def has_no_matrices(module: nn.Module) -> bool:
    """Whether all parameters and buffers of a module are vectors or scalars, of whatever shape, if it has any."""
    return all(
        sum(size > 1 for size in t.shape) < 2 for t in (*module.parameters(), *module.buffers())
    )


def is_norm(
    module: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any], output: Tensor
) -> bool:
    """Whether a module that was called with these arguments changes those of the output's shape, and equally at every scale."""

    def scaled(value: Any, scale: float) -> Any:
        alike = isinstance(value, Tensor) and value.shape == output.shape
        if not alike or not value.is_floating_point():
            return value
        root_mean_square = value.square().mean().sqrt()
        return value * (scale / root_mean_square.clamp_min(torch.finfo(value.dtype).tiny))

    def run(scale: float) -> Tensor:
        return module(
            *(scaled(a, scale) for a in args),
            **{name: scaled(a, scale) for name, a in keywords.items()},
        )

    # A module that returns what it was given (dropout in eval mode) changes nothing.
    for value in args:
        if isinstance(value, Tensor) and value.shape == output.shape and torch.equal(value, output):
            return False
    small, large = map(run, SCALES)
    return torch.allclose(small, large, rtol=0, atol=SAME * float(large.abs().max()))


IsLastState = Callable[[Tensor], bool]


@dataclass(frozen=True)
class Norm:
    """A norm that took the last block's output, by itself or after others, and its output as the model holds it."""

    name: str
    module: nn.Module
    output: Tensor


class HeadHooks:
    """Hooks on a forward pass that find the final norm and the logits.

    Attributes:
        tail: what follows the last block.
    """

    def __init__(self, replica: Replica):
        self.replica = replica
        self.tail = Tail(replica)
        self._norms: list[Norm] = []  # that took the last block's output, or that of one of them
        self._trying = False
        self._state_maps: list[StateMap] = []

    @contextmanager
    def watch(self, is_last_state: IsLastState) -> Iterator[None]:
        """Watch the forward pass that runs in this context.

        Args:
            is_last_state: whether a tensor (B, n, d) is the output of the last block so far. Not an attribute: as a method of
                the object that holds this one, it would make a cycle, which keeps the model's weights until it is collected.
        """
        description = self.replica.description
        with ExitStack() as stack:
            norms = list(description.final_norms)
            if description.include_final_norm is None:
                outside = _outside_blocks(self.replica)
                norms += [name for name, module in outside if has_no_matrices(module)]
            for name in dict.fromkeys(norms):
                self._hook(stack, name, partial(self._leave_norm, is_last_state))
            if head := description.unembedding:
                parameters = self.replica.module.get_submodule(head).parameters()
                self.tail.tables |= {len(p) for p in parameters if p.dim() == 2}
            for name, module in () if description.spans else _outside_blocks(self.replica):
                if is_alike(module, self.replica.blocks) or may_be_block(module):
                    self._hook(stack, name, partial(self._leave_state_map, is_last_state))
            stack.enter_context(self.tail)
            yield

    def enter_block(self) -> None:
        """Note that a block begins: what follows is neither an embedding nor a head."""
        self.tail.paused = True

    def leave_block(self, state: Tensor) -> None:
        """Note that a block ended with this state, and forget what took an earlier block's output."""
        self._norms = []
        self.tail.begin(state)

    def recording(self, calls: Sequence[BlockCall], seed: int | None, output: Any) -> Recording:
        """Return the recorded calls, with the final norm and the logits that were found.

        Args:
            seed: of the random numbers that the pass drew; None if it drew none.
            output: what the model returned.

        Raises:
            FloatingPointError: if the final norm returned a value that is not finite.
        """
        description = self.replica.description
        # Of other Hugging Face models, and of the encoder of a pair, it is known that none follow.
        predicts = description.include_final_norm is None or description.unembedding is not None
        logits = self.tail.find_logits(calls[-1].y, output) if predicts else None
        norm = self._final_norm()
        final_norm, normed = None, None
        if norm is not None:
            final_norm = norm.name, norm.module
            normed = self.replica.oriented(norm.output).to(self.replica.dtype)
            check_finite(
                normed,
                f"the final norm ({norm.name}), after block {len(calls)} ({calls[-1].name}),",
            )
        maps = self._state_maps
        return Recording(
            list(calls), self.tail, final_norm, normed, logits, seed=seed, state_maps=maps
        )

    def _final_norm(self) -> "Norm | None":
        """Return the last norm whose output leads to the logits; without such, the first. Of several, one that was named."""
        leading = [norm for norm in self._norms if self.tail.leads_to_logits(norm.output)]
        # A norm and a module around it return one tensor.
        norms = [norm for norm in self._norms if not leading or norm.output is leading[-1].output]
        return min(norms, key=lambda norm: not self._is_named(norm.name), default=None)

    def _is_named(self, norm: str) -> bool:
        return norm in self.replica.description.final_norms

    def _hook(self, stack: ExitStack, name: str, leave: Callable[..., None]) -> None:
        def leave_quietly(*args: Any) -> None:
            # What hooks compute is not a part of the pass.
            with torch._C.DisableTorchFunction():
                leave(name, *args)

        module = self.replica.module.get_submodule(name)
        stack.callback(module.register_forward_hook(leave_quietly, with_kwargs=True).remove)

    def _leave_norm(
        self,
        is_last_state: IsLastState,
        name: str,
        module: nn.Module,
        args: tuple,
        keywords: dict,
        output: Any,
    ) -> None:
        x = None if self._trying else state_given(module, args, keywords, output)
        if x is None or not isinstance(output, Tensor):
            return
        before = next((norm for norm in self._norms if norm.output is x), None)
        if before is None and not is_last_state(self.replica.oriented(x)):
            return
        self._trying = True
        alone = len(args) + len(keywords) == 1
        if self._is_named(name) or (alone and is_norm(module, args, keywords, output)):
            # Two in a row are one.
            if before is not None:
                name, module = f"{before.name}, {name}", nn.Sequential(before.module, module)
            self._norms.append(Norm(name, module, output))
        self._trying = False

    def _leave_state_map(
        self,
        is_last_state: IsLastState,
        name: str,
        module: nn.Module,
        args: tuple,
        keywords: dict,
        output: Any,
    ) -> None:
        given = None if self._trying else state_given(module, args, keywords, output)
        if given is None:
            return
        x, y = self.replica.oriented(given), self.replica.oriented(hidden_state(output))
        self._state_maps.append(StateMap(name, ends(x), ends(y)))
        outside = [norm for norm in self._norms if not norm.name.startswith(f"{name}.")]
        if len(outside) < len(self._norms) and is_last_state(x):
            self._trying = True
            again = partial(call_on, module, args, keywords)
            if is_alike(module, self.replica.blocks) or adds(again, given):
                self._norms = outside
            self._trying = False


def _outside_blocks(replica: Replica) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are in no block and contain none, with their names."""
    inside = {id(part) for block in replica.blocks for part in block.modules()}
    blocks = set(map(id, replica.blocks))
    for name, module in replica.module.named_modules():
        if name and id(module) not in inside:
            if not any(id(part) in blocks for part in module.modules()):
                yield name, module
