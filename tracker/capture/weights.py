"""Read a module's weights as plain tensors: offloaded, quantised, sharded, or made under inference mode; and stream them.

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

`Streaming` copies the weights of the next block from the host to an accelerator while one is measured. They travel in the
dtype they are stored in, and the device casts them: `tensor.to(device, dtype)` casts on the host, and sends 16-bit weights as
float32, in twice the bytes. Where the device has streams, they pass through pinned memory and a stream of their own, so that
the copies run beside the device's other work.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tracker.blocks.find import Blocks, unwrap
from tracker.common.errors import UsageError
from tracker.devices import is_allocation_failure, is_device_error
from tracker.linalg.transfer import copies_beside_work

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
        numbers = torch.tensor([outcome, number, -number], device=self.mesh.device_type)
        for group in self.mesh.get_all_groups():  # one of each dimension: together, the maximum over the mesh
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


def plain_tensor(module: nn.Module, name: str, tensor: Tensor, gather: Gather = gather_alone) -> Tensor:
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
    """Check that the weights of a module can be read one by one.

    Raises:
        UsageError: for weights in flattened pieces (FSDP 1, DeepSpeed ZeRO 3).
    """
    flattened = any("_fsdp_wrapped_module" in part._modules for part in module.modules())
    if flattened or any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise UsageError(
            f"{'FSDP 1' if flattened else 'DeepSpeed ZeRO 3'} keeps weights in flattened pieces that can't be read one by one; "
            "shard with FSDP2 (in Lightning, ModelParallelStrategy), or train with DDP"
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


Tensors = dict[int, Tensor]  # by id of the module's own tensor


class Streaming:
    """Copies of modules' weights on a device, made by a thread, when they are needed or before.

    Args:
        device: the device.
        itemsize: bytes of a scalar in the measuring dtype. Wider weights are left out: the host casts them first.
    """

    def __init__(self, device: torch.device, itemsize: int) -> None:
        self.device, self.itemsize = device, itemsize
        self._started: tuple[nn.Module, Future[tuple[Tensors, torch.Event | None]]] | None = None

    def start(self, module: nn.Module) -> None:
        """Start to copy the weights that a module has on the host; drop copies that were started before and not taken."""
        if self._started is None or self._started[0] is not module:
            weights = self._on_host(module)
            self._started = (module, _worker(self.device).submit(_copy, weights, self.device)) if weights else None

    def take(self, module: nn.Module) -> Tensors:
        """Return copies of the weights that a module has on the host, for one use: it may overwrite them."""
        if self._started is not None and self._started[0] is module:
            (_, copying), self._started = self._started, None
        elif weights := self._on_host(module):
            copying = _worker(self.device).submit(_copy, weights, self.device)
        else:
            return {}
        copies, copied = copying.result()
        if copied is not None:
            stream = torch.accelerator.current_stream(self.device)
            stream.wait_event(copied)
            for copy in copies.values():
                copy.record_stream(stream)  # its memory is reused only after what this stream does with it
        return copies

    def _on_host(self, module: nn.Module) -> Tensors:
        if self.device.type == "cpu":
            return {}
        tensors = [
            tensor
            for part in module.modules()
            for store in ("_parameters", "_buffers")
            for tensor in part.__dict__[store].values()
            if tensor is not None and is_plain(tensor)
        ]
        return {id(t): t for t in tensors if t.device.type == "cpu" and t.itemsize <= self.itemsize}


@contextmanager
def copies_finished(device: torch.device) -> Iterator[None]:
    """Wait on exit for copies that were started and never taken: after an error, their memory is free for another attempt."""
    try:
        yield
    finally:
        if device.type != "cpu":
            _worker(device).submit(int).result()  # one thread makes all copies, in order


def _copy(weights: Tensors, device: torch.device) -> tuple[Tensors, torch.Event | None]:
    """Return copies on the device and, if they may not be finished, the event after which they are."""
    if not copies_beside_work(device):
        return {key: weight.to(device) for key, weight in weights.items()}, None
    with _stream(device) as stream:
        # PyTorch reuses pinned memory only after the copies from it.
        copies = {key: _pinned(weight).to(device, non_blocking=True) for key, weight in weights.items()}
        return copies, stream.record_event()


def _pinned(weight: Tensor) -> Tensor:
    """Return a copy in pinned memory; `Tensor.pin_memory` refuses a weight whose elements share memory, as after `expand`."""
    return torch.empty_like(weight, pin_memory=True, requires_grad=False).copy_(weight.detach())


@cache
def _worker(device: torch.device) -> ThreadPoolExecutor:
    """Return the thread of the copies to a device. It alone uses `_stream`, whose context is not made for several threads."""
    return ThreadPoolExecutor(1, f"weights to {device}")


@cache
def _stream(device: torch.device) -> torch.Stream:
    """Return the stream of the copies to a device: one for all measurements, as PyTorch caches memory for each stream."""
    return torch.Stream(device)


def weights_memory(model: nn.Module, blocks: Blocks, dtype: torch.dtype) -> int:
    """Return the bytes that a model's weights take on an accelerator.

    Counted are all weights as they are stored, and in the measuring dtype those outside the blocks and of the largest block.
    """
    stored, converted = bytes_of(unwrap(model), dtype)
    of_blocks = _converted_blocks(model, blocks, dtype)
    return stored + converted - sum(of_blocks) + max(of_blocks, default=0)


def converted_block(model: nn.Module, blocks: Blocks, dtype: torch.dtype) -> int:
    """Return the bytes of the largest block's weights in the measuring dtype, if they are stored in another."""
    return max(_converted_blocks(model, blocks, dtype), default=0)


def _converted_blocks(model: nn.Module, blocks: Blocks, dtype: torch.dtype) -> Sequence[int]:
    names = [] if blocks.spans else blocks.names
    return [bytes_of(unwrap(model).get_submodule(name), dtype)[1] for name in names]


def bytes_of(module: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a module's weights as stored, and of copies of those in another dtype in `dtype`."""
    tensors = [*module.parameters(), *module.buffers()]
    other = sum(t.numel() for t in tensors if t.is_floating_point() and t.dtype != dtype)
    return sum(t.nbytes for t in tensors), other * dtype.itemsize
