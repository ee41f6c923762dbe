"""Measurements of the machine that runs a benchmark: time, matrix products, memory, description."""

import json
import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import tracker
from tracker.common.files import write_atomic
from tracker.common.values import Precision
from tracker.jacobians import rows
from tracker.linalg import linear
from tracker.linalg.linear import FrozenLinear, rows_of_identity
from tracker.linalg.precision import float32_products
from tracker.provenance import package_version


def synchronize(device: str | torch.device) -> None:
    """Wait until a device has finished what it was given."""
    device = torch.device(device)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def now(device: str | torch.device) -> float:
    """Return the time in seconds, after waiting for all queued work."""
    synchronize(device)
    return time.perf_counter()


def seconds(function: Callable[[], Any], device: str, runs: int = 1) -> float:
    """Return the median of the seconds that runs of a function take, after one to warm up."""
    function()
    taken = []
    for _ in range(runs):
        started = now(device)
        function()
        taken.append(now(device) - started)
    return median(taken)


class Clock:
    """Seconds spent in each stage, without those of stages nested in it; the device is synchronised first."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.within = 0.0  # seconds of the stages nested in the current one

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time spent in the context to a stage."""
        self.seconds.setdefault(stage, 0.0)
        started, before, self.within = now(self.device), self.within, 0.0
        try:
            yield
        finally:
            spent = now(self.device) - started
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
    total = 0.0
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    for outputs, inputs in layers:
        cotangents = torch.randn(d, outputs, device=device, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        product = partial(functional.linear, cotangents, weight.mT)
        with float32_products("tf32" if precision == "tf32" else "ieee"):
            by_default = seconds(product, device)
            with FrozenLinear():
                total += min(by_default, seconds(product, device))
    return total


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Record the operations of the products with weights, while Jacobians are formed from their cotangents."""
    counted: list[int] = []
    multiply, form = linear.multiply, rows.dense_jacobian

    def of_layer(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        if rows_of_identity(x) is None:
            counted.append(2 * x.numel() * len(weight))
        return multiply(x, weight, *others)

    def formed(*operands: Any) -> Tensor:
        with patch.object(linear, "multiply", of_layer):
            return form(*operands)

    with patch.object(rows, "dense_jacobian", formed):
        yield counted


def peak(function: Callable[[], Any]) -> int:
    """Return by how many bytes this process grows at most while a function runs."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return an entry of /proc/self/status, in bytes."""
    _, _, rest = Path("/proc/self/status").read_text().partition(f"{name}:")
    return int(rest.split()[0]) * 1024


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process, whose allocator has no freed memory to reuse."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def settings_of(command: Any) -> dict[str, Any]:
    """Return the settings of a benchmark that decide its result."""
    return {name: value for name, value in asdict(command).items() if name != "out"}


def save(result: dict[str, Any], file: Path | None) -> None:
    """Write a result, completely or not at all, if there is a file for it."""
    if file is not None:
        write_atomic(file, (json.dumps(result, indent=1) + "\n").encode())


def environment(device: str) -> dict[str, Any]:
    """Describe hardware, threads, load and library versions."""
    cpus = Path("/proc/cpuinfo")  # of Linux
    name = re.search("model name.*: (.*)", cpus.read_text() if cpus.exists() else "")
    return {
        "cpu": name[1] if name else platform.processor(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "transformers")},
        "block-coupling-tracker": tracker.__version__,
    }
