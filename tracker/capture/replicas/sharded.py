"""Read weights that are sharded over ranks (DTensor: FSDP2, tensor parallelism), such that a rank that fails stops all of them.

A gather is a collective: a rank that waits in one waits for all others. If one rank ran out of memory there, started again or
took another path, the others would wait until a time limit kills the training. So the ranks that hold a model's weights
agree before each gather, by the maximum over the ranks of three whole numbers:

    (outcome, i, -i)      outcome: 0 running, 1 failed, 2 out of memory;  i: the number of the weight to read, or END

The numbers of all ranks are the same if max(i) = -max(-i). If they are not, or if some outcome is not 0, no rank gathers, and
the measurement ends on all of them. A rank whose measurement ends takes part in one more agreement, with i = END and its
outcome. After an end that is not the success of all, the ranks exchange their errors, and all raise the first.

Memory can run out while a weight is gathered, too. So each rank reserves what the gather will take before the agreement.
A rank that the process is leaving (Ctrl-C, a device error) tells the others nothing: its process ends, and the launcher ends
theirs. Cost: a reduction of three numbers for each weight that is read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tracker.device_errors import is_allocation_failure, is_device_error
from tracker.errors import UsageError

Gather = Callable[[Tensor], Tensor]

# What a measurement may raise without a mistake in the code: lack of memory, numbers that are not finite, factorizations that
# fail (LinAlgError is a RuntimeError), kernels that refuse a shape.
FAILURES = (RuntimeError, ValueError, ArithmeticError, MemoryError)
RUNNING, FAILED, OUT_OF_MEMORY = range(3)
END = -1
ON_RANK = "on rank "


def gather_alone(tensor: Any) -> Tensor:
    """Gather a sharded tensor: a collective that every rank of its mesh must call."""
    return tensor.full_tensor()


@contextmanager
def gathering_together(model: nn.Module) -> Iterator[Gather]:
    """Return the function that reads sharded weights inside the context, which all ranks of the model enter and leave together.

    Raises:
        UsageError, FloatingPointError, torch.OutOfMemoryError, RuntimeError: on every rank, if a rank raises inside.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if hasattr(t, "full_tensor")]
    if not tensors:
        yield gather_alone
        return
    ranks = _Ranks(tensors)
    try:
        yield ranks.gather
    except _Ended:
        pass
    except Exception as error:
        if is_device_error(error):
            raise
        ranks.error = error
    ranks.end()


def portable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: of one of four types, without the frames and their tensors.

    A note names this rank.
    """
    sent = RuntimeError(str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}")
    if is_allocation_failure(error):
        sent = torch.OutOfMemoryError(str(error))
    for kind in (UsageError, FloatingPointError):
        if isinstance(error, kind):
            sent = kind(str(error))
    sent.add_note(f"{ON_RANK}{torch.distributed.get_rank()}")
    return sent


class _Ended(BaseException):
    """Another rank has ended the measurement. A model's code may catch any Exception."""


class _Ranks:
    """The ranks of the largest mesh over which a model's tensors are sharded."""

    def __init__(self, tensors: list[Any]) -> None:
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.mesh: DeviceMesh = max((tensor.device_mesh for tensor in tensors), key=lambda mesh: mesh.size())
        self.ended = False
        self.error: Exception | None = None  # why this rank can't go on

    def gather(self, tensor: Any) -> Tensor:
        """Gather a tensor, after all ranks have agreed to."""
        if not self.ended:
            outcome = RUNNING
            try:
                _reserve(tensor)
            except (RuntimeError, MemoryError) as error:
                if not is_allocation_failure(error):
                    raise
                self.error, outcome = error.with_traceback(None), OUT_OF_MEMORY
            if self._agree(outcome, self.numbers.setdefault(id(tensor), len(self.numbers))):
                return tensor.full_tensor()
        raise _Ended

    def end(self) -> None:
        """Tell the other ranks that this one has ended.

        Raises:
            UsageError, FloatingPointError, torch.OutOfMemoryError, RuntimeError: the first error of the ranks, on each.
            Exception: this rank's own error, if it is none of `FAILURES`.
        """
        outcome = RUNNING if self.error is None else OUT_OF_MEMORY if is_allocation_failure(self.error) else FAILED
        if not self.ended and self._agree(outcome, END):
            return
        errors: list[Any] = [None if self.error is None else portable(self.error)]
        for group in self.mesh.get_all_groups():
            parts: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(parts, errors, group=group)
            errors = [error for part in parts for error in part]
        differ = RuntimeError("the ranks do not read the same weights in the same order, so none can read any")
        if self.error is not None and not isinstance(self.error, FAILURES):
            raise self.error
        raise next((error for error in errors if error is not None), differ) from self.error

    def _agree(self, outcome: int, number: int) -> bool:
        """Return whether no rank has failed and all have given the same number."""
        given = torch.tensor([outcome, number, -number], device=self.mesh.device_type)
        for group in self.mesh.get_all_groups():  # one of each dimension: together, the maximum over the mesh
            torch.distributed.all_reduce(given, torch.distributed.ReduceOp.MAX, group)
        worst, largest, negated = given.tolist()
        self.ended = worst != RUNNING or largest != -negated
        return not self.ended


def _reserve(tensor: Any) -> None:
    """Allocate and release what a gather takes at most: the pieces of all ranks, and the whole that they are copied to."""
    device = tensor.to_local().device
    _ = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for _ in range(2)]
