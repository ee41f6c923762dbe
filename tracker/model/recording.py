"""The recorded forward pass: each block's call, with its arguments, states, keys and values, ready to be replayed.

For block l of L, `BlockCall.x` is X^{l-1} and `BlockCall.y` is X^l, both (B, n, d). Calling a `BlockCall` evaluates the block
again on another hidden state. Memory: the L + 1 hidden states and every block's keys and values.

Tensors are kept in memory up to a budget, and beyond it in memory-mapped temporary files, or in the host's memory (`Spill`). A
file is unlinked before it is used, so it disappears with its last tensor, also if the process is killed. The operating system
writes its pages out and reads them back.
"""

import inspect
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tracker.common.errors import NO_SPACE, UsageError
from tracker.common.text import size
from tracker.linalg.linear import FrozenLinear
from tracker.linalg.transfer import copies_beside_work
from tracker.model.guard import clone_if_tensor, copy_nested
from tracker.model.hidden_state import hidden_state
from tracker.model.replica import Replica
from tracker.model.state_maps import StateMap
from tracker.model.tail import Tail


@dataclass
class Spill:
    """A budget of `memory` bytes: tensors within it stay where they are, the others go to files (on the CPU)."""

    memory: int  # bytes left

    def keep(self, tensor: Tensor) -> Tensor:
        """Return the same values in a storage of their own size, in memory or in a file.

        Raises:
            UsageError: if the directory of temporary files has no space for them.
        """
        if tensor.nbytes > self.memory:
            return _in_file(tensor)
        self.memory -= tensor.nbytes
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def host_memory() -> int:
    """Return how many bytes of the host's memory an accelerator's tensors may take: a quarter of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host's memory, for later use on its device alone: the device may still be filling the copy."""
    pinned = copies_beside_work(tensor.device)
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return kept.copy_(tensor, non_blocking=pinned)


def _in_file(tensor: Tensor) -> Tensor:
    with space_for(tensor.nbytes), tempfile.NamedTemporaryFile(prefix="tracker-") as file:
        # Not mapped yet: a full disk raises here.
        file.write(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        file.flush()
        return torch.from_file(
            file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype
        ).view(tensor.shape)


@contextmanager
def space_for(needed: int) -> Iterator[None]:
    """Say what to do if the directory of temporary files has no space for so many bytes.

    Raises:
        UsageError: if it has none.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise UsageError(
            f"what is recorded and measured exceeds the memory budget, and {tempfile.gettempdir()} has no space for another "
            f"{size(needed)}; set TMPDIR to a directory with more space, raise the budget, or give shorter inputs"
        ) from error


@dataclass
class AttentionCall:
    """Keys, values and mask of one attention of a block in the recorded pass; shapes as in `tracker.model.attention`."""

    key: Tensor
    value: Tensor
    mask: Any  # as the model made it: a tensor, None, or an object of the attention's own, such as a BlockMask
    causal: bool


@dataclass
class BlockCall:
    """One block's call in the recorded pass: its arguments, input, output and attentions. Layer l counts from 1."""

    layer: int
    name: str
    block: nn.Module
    arguments: inspect.BoundArguments
    state: str  # the argument that carries the hidden state
    replica: Replica = field(repr=False)
    x: Float[Tensor, "B n d"]
    y: Float[Tensor, "B n d"] = field(init=False)
    final_norm: nn.Module | None = None
    attention: list[AttentionCall] = field(default_factory=list)
    input_dtype: torch.dtype | None = None  # dtype of the hidden state between the model's blocks

    def recorded_tensors(self) -> Iterator[Tensor]:
        """Yield the input, the output, and the keys and values of every attention."""
        yield from (self.x, self.y)
        for attention in self.attention:
            yield from (attention.key, attention.value)

    @property
    def recorded_coarser(self) -> bool:
        """Whether the keys and values were recorded in a lower precision than the dtype that the call has now."""
        return self.x.dtype != self.replica.dtype

    def to(self, dtype: torch.dtype, device: torch.device) -> "BlockCall":
        """Return the same call with its recorded tensors in this dtype and on this device."""
        if all(t.dtype == dtype and t.device == device for t in self.recorded_tensors()):
            return self

        def convert(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # Tensors that the model itself keeps in another precision stay in it.
            return value.to(device, dtype if value.dtype == self.replica.dtype else value.dtype)

        arguments = {
            name: copy_nested(value, convert, {})
            for name, value in self.arguments.arguments.items()
        }
        bound = inspect.BoundArguments(self.arguments.signature, OrderedDict(arguments))
        attention = [
            AttentionCall(convert(a.key), convert(a.value), convert(a.mask), a.causal)
            for a in self.attention
        ]
        other = replace(self, arguments=bound, x=convert(self.x), attention=attention)
        other.y = convert(self.y)
        return other

    def on_device(self) -> "BlockCall":
        """Return the same call as the replica measures: in its dtype, and on its device."""
        return self.to(self.replica.dtype, self.replica.device)

    def __call__(self, x: Tensor, arguments: Mapping[str, Any] | None = None) -> Tensor:
        """Run the block, and the final norm if it is folded in, on a hidden state (B, n, d). The block has its weights.

        Args:
            x: the hidden state.
            arguments: replacements for recorded arguments.
        """
        arguments = arguments or {}
        # Copies: what the block writes into its arguments must not reach the next call.
        recorded = {
            name: value for name, value in self.arguments.arguments.items() if name not in arguments
        }
        bound = inspect.BoundArguments(
            self.arguments.signature, OrderedDict(self.arguments.arguments)
        )
        bound.arguments.update(copy_nested(recorded, clone_if_tensor, {}) | dict(arguments))
        argument = x if self.input_dtype in (None, self.replica.dtype) else x.to(self.input_dtype)
        bound.arguments[self.state] = self.replica.oriented(argument)
        with self.replica.guard(), self.replica.fresh_weights(self.block):
            out = hidden_state(self.block(*bound.args, **bound.kwargs))
            out = out if self.final_norm is None else self.final_norm(out)
        return self.replica.oriented(out).to(x.dtype)


@dataclass
class Recording:
    """One forward pass: the calls of its blocks, and the final norm that took the last block's output, if any."""

    calls: list[BlockCall]
    tail: Tail  # what follows the last block, until its states are measured
    final_norm: tuple[str, nn.Module] | None = None
    normed: Float[Tensor, "B n d"] | None = None  # the final norm's output
    logits: int | None = None  # of each token, if as many as the vocabulary
    obstacle: str = ""  # why logits of other states are not known, if these were asked for
    # The last block with the final norm, if the measures include it
    normed_last: BlockCall | None = None
    # Calls of modules outside the blocks that take and return a state
    state_maps: Sequence[StateMap] = ()
    seed: int | None = None  # of the random numbers that the pass drew; None if it drew none
    sample_seeds: Sequence[int] = ()  # of what measures draw for each sample

    @property
    def measured(self) -> list[BlockCall]:
        """The calls whose Jacobians are measured.

        These are the calls of all blocks and, if the measures include the final norm, the last one with it.
        """
        return [*self.calls, *([self.normed_last] if self.normed_last else [])]

    def states(
        self, samples: slice, tokens: slice, device: torch.device, normed: bool = False
    ) -> Float[Tensor, "depth n d"]:
        """Return x^0 .. x^L of some samples at these tokens, the tokens of one sample after those of another.

        Args:
            normed: apply the final norm to x^L, where the measures include it.
        """
        last = self.normed_last if normed and self.normed_last else self.calls[-1]
        recorded = (self.calls[0].x, *(call.y for call in (*self.calls[:-1], last)))
        return torch.stack([x[samples, tokens].flatten(0, 1).to(device) for x in recorded])

    def nbytes(self) -> int:
        """Count the bytes of what is recorded: hidden states, keys and values."""
        return sum(
            {id(t): t.nbytes for call in self.measured for t in call.recorded_tensors()}.values()
        )

    def with_final_norm(self) -> "Recording":
        """Return the same pass, with the last block also as one that ends in the final norm (paper, eq. 7)."""
        if self.final_norm is None or self.normed is None:
            return self
        last = replace(self.calls[-1], final_norm=self.final_norm[1])
        last.y = self.normed
        return replace(self, normed_last=last)


def recording_kernels(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the context in which linear layers multiply while a pass is recorded.

    `FrozenLinear` in float32. In float64 it gains nothing, and it would change how a block multiplies what it computes in
    float32 regardless of the measuring dtype.
    """
    return FrozenLinear() if dtype == torch.float32 else nullcontext()
