"""Stream blocks' weights from the host to an accelerator, those of the next block while one is measured.

Weights travel in the dtype they are stored in, and the device casts them: `tensor.to(device, dtype)` casts on the host, and
sends 16-bit weights as float32, in twice the bytes. Where the device has streams, they pass through pinned memory and a stream
of their own, so that the copies run beside the device's other work.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from tracker.capture.replicas.weights import is_plain
from tracker.linalg.transfer import copies_beside_work

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
