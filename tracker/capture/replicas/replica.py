"""Give a copy of a model's module tree the model's weights, in the measuring dtype, only while they are needed.

So bf16 and fp16 weights are measured in float32, hooks on the caller's modules never fire, and nothing has to be restored
when measuring raises.

Memory: in the measuring dtype, the weights outside the blocks and those of one block at a time; on an accelerator, the next
block's in the dtype they are stored in (`streaming`). Weights that have the measuring dtype and device already are shared, not
copied.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.find import Blocks
from tracker.capture.attention import hook_attn_method
from tracker.capture.hooked_attention import hook_methods
from tracker.capture.random_numbers import Generator, Generators, copy_generator, seed_of
from tracker.capture.replicas.configs import adjust_configs
from tracker.capture.replicas.copies import clone_if_tensor, copy_nested
from tracker.capture.replicas.guard import SharedTensors, WriteGuard
from tracker.capture.replicas.module_copier import ModuleCopier
from tracker.capture.replicas.module_state import WeightHolder
from tracker.capture.replicas.sharded import Gather, gather_alone
from tracker.capture.replicas.streaming import Streaming, Tensors
from tracker.capture.replicas.weights import check_whole, plain_tensor


class StopForward(BaseException):
    """Raised by a hook to end a forward pass (`Replica.run`) with a value. A model's code may catch any Exception."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Replica:
    """A copy of a model's module tree whose modules hold weights, in `dtype` on `device`, only inside `materialize`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        dtype: torch.dtype,
        device: torch.device,
        gather: Gather = gather_alone,
    ):
        check_whole(model)
        self._shared = SharedTensors()
        self.generators = Generators(device)
        self.module = ModuleCopier(self._shared, self.generators).copy(model)
        for part in self.module.modules():
            hook_attn_method(part)
            hook_methods(part)
            if isinstance(part.__dict__.get("_dtype"), torch.dtype):  # LightningModule's own record of dtype and device
                part.__dict__.update(_dtype=dtype, _device=device)
        adjust_configs(self.module, dtype, device)
        self.blocks = [] if blocks.spans else [self.module.get_submodule(name) for name in blocks.names]
        self.description = blocks
        self.dtype = dtype
        self.device = device
        self.gather = gather  # reads a weight that is sharded over ranks
        self._streaming = Streaming(device, dtype.itemsize)
        self._next = dict(zip_longest(map(id, self.blocks), self.blocks[1:]))  # by id of the block before
        self.stateless: set[int] = set()  # blocks, by id, found to keep no state between calls
        self.ends_in_norm: dict[int, bool] = {}  # by id of the block: whether it returns the output of a norm
        self._writers: set[int] = set()  # modules, by id, that write to their weights or buffers

    def guard(self) -> WriteGuard:
        """Return the context for a forward pass: writes to the caller's tensors go to copies of them."""
        return WriteGuard(self._shared)

    def forward(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Run the forward pass on copies of these inputs, which seed its random numbers."""
        copies = self.copy_inputs((list(arguments), dict(keywords)))
        return self.run(*copies, seed=seed_of(arguments, keywords))

    def run(self, arguments: Sequence[Any], keywords: Mapping[str, Any], seed: int) -> Any:
        """Run the forward pass under `guard`; return its output, or the value of the `StopForward` that ended it.

        Args:
            seed: of the random numbers that the pass may draw.
        """
        self.generators.seed(seed)
        with self.guard():
            try:
                return self.module(*arguments, **keywords)
            except StopForward as stopped:
                return stopped.value

    @contextmanager
    def watch_writes(self, module: nn.Module) -> Iterator[None]:
        """Undo on exit what `module` wrote to its weights, and remember that it writes to them."""
        self._shared.begin_call()
        yield
        self._undo_writes(module)

    def _undo_writes(self, module: nn.Module) -> None:
        if self._shared.undo_writes():
            self._writers.add(id(module))

    def fresh_weights(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return the context for one call of a block that holds its weights: copies of them, if it writes to them."""
        return self.materialize(block) if id(block) in self._writers else nullcontext()

    @contextmanager
    def stream_blocks(
        self, enter: Callable[..., None] | None = None, leave: Callable[..., Any] | None = None
    ) -> Iterator[None]:
        """Hold the weights outside the blocks throughout, and each block's weights while that block runs.

        Args:
            enter: a forward pre-hook (with keywords) for every block, called before the block's weights are loaded.
            leave: a forward hook for every block, called before they are released, when the block's writes to them are
                undone. It may call the block again: that runs neither hook.
        """
        running: list[tuple[nn.Module, ExitStack | None]] = []  # with no stack: called again while it runs
        # Parts of blocks that wrote to their buffers, which a later call in this pass may read.
        written: list[WeightHolder] = []

        def load(block: nn.Module, args: tuple, kwargs: dict) -> None:
            if any(block is other for other, _ in running):
                running.append((block, None))
                return
            if enter is not None:
                enter(block, args, kwargs)
            weights = ExitStack()
            running.append((block, weights))
            weights.enter_context(self.materialize(block, written=written))
            self._shared.begin_call()

        def release(block: nn.Module, args: tuple, output: Any) -> Any:
            _, weights = running[-1]
            changed = None
            if weights is not None:
                self._undo_writes(block)
                changed = leave(block, args, output) if leave is not None else None
                weights.close()
            running.pop()
            return changed

        with ExitStack() as stack:
            stack.enter_context(self.materialize(self.module, exclude=self.blocks))
            stack.callback(lambda: [part.restore() for part in reversed(written)])
            stack.callback(lambda: [weights.close() for _, weights in reversed(running) if weights is not None])
            for block in self.blocks:
                stack.callback(block.register_forward_pre_hook(load, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(release).remove)
            yield

    @contextmanager
    def materialize(
        self,
        module: nn.Module | None,
        exclude: Sequence[nn.Module] = (),
        dtype: torch.dtype | None = None,
        written: list[WeightHolder] | None = None,
    ) -> Iterator[None]:
        """Give `module`, except the parts in `exclude`, its weights on the device, in the measuring dtype or in `dtype`.

        Args:
            written: collects the parts that wrote to their buffers, instead of restoring them on exit.
        """
        dtype = dtype or self.dtype
        copied = id(module) in self._writers
        skipped = {id(part) for excluded in exclude for part in excluded.modules()}
        moved = self._streaming.take(module) if module is not None and id(module) in self._next else {}
        converted: Tensors = {}  # tied weights stay tied
        held: list[WeightHolder] = []
        try:
            for part in module.modules() if module is not None else ():
                if id(part) in skipped:
                    continue
                held.append(WeightHolder(part))
                for store in ("_parameters", "_buffers"):
                    part.__dict__[store] = {
                        name: self._materialize(part, name, t, dtype, copied, moved, converted)
                        for name, t in part.__dict__[store].items()
                    }
                held[-1].note_buffers()
                for hook in part.__dict__.get("_weight_hooks", ()):  # a part made in a forward pass has no such entry
                    hook(part, ())
            if following := self._next.get(id(module)):
                self._streaming.start(following)
            with self._shared.watch(converted.values()):
                yield
        finally:
            for part in held:
                part.release(written)

    def _materialize(
        self,
        part: nn.Module,
        name: str,
        tensor: Tensor | None,
        dtype: torch.dtype,
        copied: bool,
        moved: Tensors,
        converted: Tensors,
    ) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in converted:
            if id(tensor) in moved:
                plain = self.convert(moved.pop(id(tensor)), dtype)
            else:
                plain = self.convert(plain_tensor(part, name, tensor, self.gather), dtype)
            converted[id(tensor)] = plain.clone() if copied or name in part._buffers else plain
        return converted[id(tensor)]

    def copy_inputs(self, value: Any) -> Any:
        """Copy a forward pass's inputs, nested or not, their tensors converted: the pass may write to them."""

        def leaf(entry: Any) -> Any:
            if isinstance(entry, Generator):
                return copy_generator(entry)
            converted = self.convert(entry) if isinstance(entry, Tensor) else entry
            return clone_if_tensor(converted) if converted is entry else converted

        return copy_nested(value, leaf, {})

    def convert(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Move a tensor to the device; cast it to the measuring dtype, or to `dtype`, if it is floating."""
        dtype = (dtype or self.dtype) if tensor.is_floating_point() else tensor.dtype
        if dtype.itemsize > tensor.itemsize:
            tensor = tensor.to(self.device)  # cast there: on the host it would grow before it is copied
        tensor = tensor.to(self.device, dtype)
        return tensor.clone() if tensor.is_inference() else tensor  # inference tensors can't enter a graph
