"""Rates of the machine: matrix products, copies, the cost of a launch: `python -m benchmarks.gpu.hardware --out FILE`.

These are the limits that the other steps are compared with. All inputs are random numbers.
"""

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.arguments import Given, parse

PRECISIONS = ("float32", "tf32", "bfloat16", "float64")
REPEATS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result."""
    from benchmarks.machine import save

    given = parse("benchmarks.gpu.hardware", __doc__, arguments)
    result: dict[str, Any] = {"environment": describe(given.device)}
    for name, function in (("products", products), ("copies", copies), ("latencies", latencies)):
        result[name] = function(given)
        save(result, given.out)
    return 0


def describe(device: str) -> dict[str, Any]:
    """Describe GPU, processor and libraries."""
    import torch

    from benchmarks.machine import environment

    found = environment(device) | {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["free_bytes"] = torch.cuda.mem_get_info(device)[0]
    return found


def seconds(function: Callable[[], Any], device: str, repeats: int = REPEATS, warm_up: int = 2) -> float:
    """Return the median time of a call, after some to warm up; the device is synchronized before and after."""
    from benchmarks.machine import Clock

    clock = Clock(device)
    taken = []
    for repeat in range(warm_up + repeats):
        started = clock.now()
        function()
        if repeat >= warm_up:
            taken.append(clock.now() - started)
    return median(taken)


def products(given: Given) -> dict[str, dict[str, float]]:
    """Return operations per second of square matrix products, by precision and size."""
    import torch

    from tracker.linalg.precision import float32_products

    found: dict[str, dict[str, float]] = {}
    for precision in PRECISIONS:
        dtype = getattr(torch, "float32" if precision == "tf32" else precision)
        for n in (64, 128) if given.small else (1024, 5120, 8192):
            A, B = (torch.randn(n, n, device=given.device, dtype=dtype) for _ in range(2))
            with float32_products("tf32" if precision == "tf32" else "ieee"):
                taken = seconds(lambda A=A, B=B: A @ B, given.device)
            found.setdefault(precision, {})[str(n)] = 2 * n**3 / taken
    return found


def copies(given: Given) -> dict[str, float]:
    """Return bytes per second of copies between pageable or pinned memory and the device, and on the device.

    The last two move float16 numbers from pageable memory and convert them to float32: in one call of `Tensor.to`, and first
    moved, then converted. Bytes are those of the float16 numbers.
    """
    import torch

    size = 1 << 20 if given.small else 1 << 28
    on_device = torch.empty(size, dtype=torch.uint8, device=given.device)
    memory = {"pageable": torch.randint(256, (size,), dtype=torch.uint8)}
    if given.device.startswith("cuda"):
        memory["pinned"] = memory["pageable"].pin_memory()
    found = {}
    for name, host in memory.items():
        ways = {f"{name} to device": (on_device, host), f"device to {name}": (host, on_device)}
        for way, (target, source) in ways.items():
            found[way] = size / seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), given.device)
    other = on_device.clone()
    found["device to device"] = size / seconds(lambda: on_device.copy_(other), given.device)
    half = memory["pageable"].view(torch.float16)
    found["float16 converted on the way"] = size / seconds(lambda: half.to(given.device, torch.float32), given.device)
    found["float16 converted on the device"] = size / seconds(lambda: half.to(given.device).float(), given.device)
    return found


def latencies(given: Given) -> dict[str, float]:
    """Return the seconds of the host for one launch, and for one value read from the device."""
    import torch

    from benchmarks.machine import Clock

    x, clock, count = torch.zeros(1, device=given.device), Clock(given.device), 100 if given.small else 2000
    for _ in range(count):
        x.add_(1)
    clock.now()
    started = time.perf_counter()
    for _ in range(count):
        x.add_(1)
    launched = time.perf_counter() - started
    clock.now()
    started = time.perf_counter()
    for _ in range(count):
        x.item()
    return {"launch": launched / count, "item": (time.perf_counter() - started) / count}


if __name__ == "__main__":
    sys.exit(main())
