"""Read a module's weights as plain tensors: offloaded, quantised, sharded, or made under inference mode; and count their bytes.

All code that depends on accelerate, bitsandbytes and distributed tensors is here; none of them is imported unless the
model uses it.

Weights that are sharded over ranks (DTensor: FSDP2, tensor parallelism) are read such that a rank that fails stops all of them. A
gather is a collective: a rank that waits in one waits for all others. If one rank ran out of memory there, started again or
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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from tracker.common.errors import UsageError
from tracker.devices import is_allocation_failure, is_device_error
from tracker.model.description import Blocks
from tracker.model.wrappers import unwrap

Gather = Callable[[Tensor], Tensor]

# What a measurement may raise without a mistake in the code: lack of memory, numbers that are not finite, factorizations that
# fail (LinAlgError is a RuntimeError), kernels that refuse a shape.
FAILURES = (RuntimeError, ValueError, ArithmeticError, MemoryError)
RUNNING, FAILED, OUT_OF_MEMORY = range(3)
END = -1
ON_RANK = "on rank "
IN_FORWARD = "in the forward pass of "


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
    # Also after success: other ranks may have failed, and would wait for this one in a gather.
    ranks.end()


def notes(error: Exception) -> Sequence[str]:
    """Return the notes of an error."""
    return getattr(error, "__notes__", ())


@contextmanager
def noting_forward(name: str) -> Iterator[None]:
    """Note of an error that it is one of a model's forward pass on its inputs, unless memory or the device failed."""
    try:
        yield
    except Exception as error:
        of_machine = is_allocation_failure(error) or is_device_error(error)
        own = not isinstance(error, UsageError) and not of_machine
        if own and not fails_in_forward(error):
            error.add_note(f"{IN_FORWARD}{name}")
        raise


def fails_in_forward(error: Exception) -> bool:
    """Whether `noting_forward` has noted an error."""
    return any(note.startswith(IN_FORWARD) for note in notes(error))


def portable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: of one of four types, without the frames and their tensors.

    A note names this rank.
    """
    sent = RuntimeError(
        str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
    )
    if is_allocation_failure(error):
        sent = torch.OutOfMemoryError(str(error))
    for kind in (UsageError, FloatingPointError):
        if isinstance(error, kind):
            sent = kind(str(error))
    sent.add_note(f"{ON_RANK}{torch.distributed.get_rank()}")
    for note in filter(lambda note: note.startswith(IN_FORWARD), notes(error)):
        sent.add_note(note)
    return sent


class _Ended(BaseException):
    """Another rank has ended the measurement. A model's code may catch any Exception."""


class _Ranks:
    """The ranks of the largest mesh over which a model's tensors are sharded."""

    def __init__(self, tensors: list[Any]) -> None:
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        # A weight may be sharded over a part of the mesh; all ranks are in the largest.
        meshes = (tensor.device_mesh for tensor in tensors)
        self.mesh: DeviceMesh = max(meshes, key=lambda mesh: mesh.size())
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
        outcome = RUNNING
        if self.error is not None:
            outcome = OUT_OF_MEMORY if is_allocation_failure(self.error) else FAILED
        if not self.ended and self._agree(outcome, END):
            return
        errors: list[Any] = [None if self.error is None else portable(self.error)]
        for group in self.mesh.get_all_groups():
            parts: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(parts, errors, group=group)
            errors = [error for part in parts for error in part]
        differ = RuntimeError(
            "the ranks do not read the same weights in the same order, so none can read any"
        )
        if self.error is not None and not isinstance(self.error, FAILURES):
            raise self.error
        raise next((error for error in errors if error is not None), differ) from self.error

    def _agree(self, outcome: int, number: int) -> bool:
        """Return whether no rank has failed and all have given the same number."""
        # One reduction tells the largest and the smallest number: the maximum of the negated ones.
        numbers = torch.tensor([outcome, number, -number], device=self.mesh.device_type)
        # One of each dimension: together, the maximum over the mesh
        for group in self.mesh.get_all_groups():
            torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group)
        worst, largest, negated = numbers.tolist()
        self.ended = worst != RUNNING or largest != -negated
        return not self.ended


def _reserve(tensor: Any) -> None:
    """Allocate and release what a gather takes at most: the pieces of all ranks, and the whole that they are copied to."""
    device = tensor.to_local().device
    _ = [torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for _ in range(2)]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor holds its own values: not quantised, sharded, sparse or offloaded."""
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and getattr(tensor, "quant_state", None) is None
        and getattr(tensor, "SCB", None) is None
    )


def plain_tensor(module: nn.Module, name: str, tensor: Tensor, gather: Gather) -> Tensor:
    """Return the full, dequantised, detached value of a module's parameter or buffer.

    Args:
        gather: reads a sharded tensor.

    Raises:
        UsageError: if the weights are on the meta device and accelerate has no offloaded copy.
    """
    if tensor.device.type == "meta":
        tensor = _offloaded(module, name)
    if getattr(tensor, "quant_state", None) is not None:  # bitsandbytes, 4 bit
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(tensor.data, tensor.quant_state)  # type: ignore[attr-defined]
    if getattr(tensor, "SCB", None) is not None:  # bitsandbytes, 8 bit
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(tensor.data, tensor.SCB)  # type: ignore[attr-defined]
    if hasattr(tensor, "full_tensor"):
        return gather(tensor).detach()
    return tensor.detach() if tensor.requires_grad else tensor


def check_whole(module: nn.Module) -> None:
    """Check that the weights of a module can be read one by one, and that its code can run with others.

    Raises:
        UsageError: for weights in flattened pieces (FSDP 1, DeepSpeed ZeRO 3), weights that have no values yet, and TorchScript.
    """
    flattened = any("_fsdp_wrapped_module" in part._modules for part in module.modules())
    if flattened or any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise UsageError(
            f"{'FSDP 1' if flattened else 'DeepSpeed ZeRO 3'} keeps weights in flattened pieces that can't be read one by one; "
            "shard with FSDP2 (in Lightning, ModelParallelStrategy), or train with DDP"
        )
    for name, part in module.named_modules():
        named = f"{name or 'the model'} ({type(part).__name__})"
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{named} is TorchScript, whose code can't run with copies of its weights: measure the model with the Python "
                "module from which it was scripted or traced"
            )
        if type(part).__module__.startswith("torch.ao.nn.quantized"):
            raise UsageError(
                f"{named} computes with whole numbers, which have no derivative: measure it as it was before quantization"
            )
        if any(map(is_lazy, (*part.parameters(recurse=False), *part.buffers(recurse=False)))):
            raise UsageError(
                f"the weights of {named} have no values yet: run the model on one batch, then measure"
            )


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class whose forward takes plain weights: nn.Linear for a quantised linear layer, else `cls`."""
    quantised = cls.__module__.startswith("bitsandbytes.") and issubclass(cls, nn.Linear)
    return nn.Linear if quantised else cls


def _offloaded(module: nn.Module, name: str) -> Tensor:
    """Return the value that accelerate's hook on the module would load for its forward pass."""
    hook: Any = module.__dict__.get("_hf_hook")
    for one in getattr(hook, "hooks", [hook]):
        offloaded = getattr(one, "weights_map", None)
        if offloaded is not None:
            return torch.as_tensor(offloaded[name])
    raise UsageError(
        f"the weights of {type(module).__name__} are on the meta device, with no offloaded copy; load the model first"
    )


def weights_memory(model: nn.Module, blocks: Blocks | None, dtype: torch.dtype) -> int:
    """Return the bytes that a model's weights take on an accelerator.

    Counted are all weights as they are stored, and in the measuring dtype those outside the blocks and of the largest block; of
    blocks that are not known, all.
    """
    stored, converted = bytes_of(unwrap(model), dtype)
    of_blocks = _converted_blocks(model, blocks, dtype)
    return stored + converted - sum(of_blocks) + max(of_blocks, default=0)


def converted_block(model: nn.Module, blocks: Blocks, dtype: torch.dtype) -> int:
    """Return the bytes of the largest block's weights in the measuring dtype, if they are stored in another."""
    return max(_converted_blocks(model, blocks, dtype), default=0)


def _converted_blocks(model: nn.Module, blocks: Blocks | None, dtype: torch.dtype) -> Sequence[int]:
    names = [] if blocks is None or blocks.spans else blocks.names
    return [bytes_of(unwrap(model).get_submodule(name), dtype)[1] for name in names]


def bytes_of(module: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a module's weights as stored, and of copies of those in another dtype in `dtype`."""
    tensors = [*module.parameters(), *module.buffers()]
    other = sum(_stored(t) for t in tensors if t.is_floating_point() and t.dtype != dtype)
    return sum(_stored(t) * t.itemsize for t in tensors), other * dtype.itemsize


def _stored(tensor: Tensor) -> int:
    """Return how many entries a tensor stores: of a sparse one, its values without their indices."""
    return tensor._values().numel() if tensor.layout == torch.sparse_coo else tensor.numel()
