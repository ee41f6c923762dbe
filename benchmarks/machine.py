"""Measurements of the machine that runs a benchmark: time, matrix products, memory, description."""

import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import tracker
from tracker.common.files import write_atomic
from tracker.common.values import Precision
from tracker.jacobians import rows
from tracker.linalg import jacobian, linear
from tracker.linalg.linear import FrozenLinear, rows_of_identity
from tracker.linalg.precision import float32_products
from tracker.provenance import package_version


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has finished what it was given."""
    device = torch.device(device)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Clock:
    """Seconds spent in each stage, without those of stages nested in it; the device is synchronised first."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.within = 0.0  # seconds of the stages nested in the current one

    def now(self) -> float:
        """Return the time, after waiting for all queued work."""
        synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time spent in the context to a stage."""
        self.seconds.setdefault(stage, 0.0)
        started, before, self.within = self.now(), self.within, 0.0
        try:
            yield
        finally:
            spent = self.now() - started
            self.seconds[stage] += spent - self.within
            self.within = before + spent


def linear_shapes(block: nn.Module) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of each linear layer of a block."""
    return [(m.out_features, m.in_features) for m in block.modules() if isinstance(m, nn.Linear)]


def gemm_seconds(layers: list[tuple[int, int]], d: int, device: str, precision: Precision) -> float:
    """Time the matrix products of d cotangents in one block, in seconds: (d, outputs) @ (outputs, inputs) for each layer.

    Each layer is timed with PyTorch's default and with `tracker.linalg.linear`; the faster one counts. Both multiply in the
    precision given.
    """
    seconds = 0.0
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    for outputs, inputs in layers:
        cotangents = torch.randn(d, outputs, device=device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        clock = Clock(device)
        with float32_products("tf32" if precision == "tf32" else "ieee"):
            for way in (nullcontext(), FrozenLinear()):
                with way, clock(type(way).__name__):
                    functional.linear(cotangents, weight.mT)
        seconds += min(clock.seconds.values())
    return seconds


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Record the operations of the products with weights, while Jacobians are formed from their cotangents."""
    counted: list[int] = []
    forming = False
    multiply, form = linear.multiply, jacobian.dense_jacobian

    def of_layer(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        if forming and rows_of_identity(x) is None:
            counted.append(2 * x.numel() * len(weight))
        return multiply(x, weight, *others)

    def formed(*operands: Any) -> Tensor:
        nonlocal forming
        forming = True
        try:
            return form(*operands)
        finally:
            forming = False

    with (
        patch.object(linear, "multiply", of_layer),
        patch.object(jacobian, "dense_jacobian", formed),
        patch.object(rows, "dense_jacobian", formed),
    ):
        yield counted


def reset_peak(device: str) -> int:
    """Reset the peak of memory and return the bytes in use."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak(device: str) -> int:
    """Return the largest number of bytes in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else status("VmHWM")


def status(name: str) -> int:
    """Return an entry of /proc/self/status, in bytes."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) * 1024


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process, whose allocator has no freed memory to reuse."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def keep(result: dict[str, Any], file: Path) -> None:
    """Write a result and print its path."""
    save(result, file)
    print(file)


def save(result: dict[str, Any], file: Path) -> None:
    """Write a result completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, (json.dumps(result, indent=1) + "\n").encode())


def environment(device: str) -> dict[str, Any]:
    """Describe hardware, threads, load and library versions."""
    cpus = Path("/proc/cpuinfo")  # of Linux
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "transformers")},
        "block-coupling-tracker": tracker.__version__,
    }
