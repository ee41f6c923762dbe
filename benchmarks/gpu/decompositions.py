"""Time decompositions alone: `python -m benchmarks.gpu.decompositions --out FILE`.

SVD, symmetric eigenvalues, Cholesky and QR of batches, on the device and, with the copies there and back, on the CPU's
cores; and `tracker.linalg.svd.top_singular_triplets` by both methods. The result is written after every row.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.arguments import parse
from benchmarks.gpu.hardware import seconds

if TYPE_CHECKING:
    from torch import Tensor

SIZES: dict[str, tuple[tuple[int, ...], ...]] = {  # (matrices, rows, columns), cheap ones first
    "cholesky_ex": ((768, 192, 192), (8, 256, 256), (1, 1024, 1024), (8, 1024, 1024), (1, 5120, 5120)),
    "qr": ((64, 192, 20), (24, 1024, 16), (36, 5120, 16)),
    "eigh": ((768, 40, 40), (24, 32, 32), (24, 100, 100), (500, 100, 100), (36, 160, 160), (1, 1024, 1024)),
    "svd": (
        (768, 20, 20),
        (64, 192, 192),
        (24, 200, 200),
        (1, 512, 512),
        (8, 512, 512),
        (1, 1024, 1024),
        (8, 1024, 1024),
    ),
    "svdvals": ((1, 1024, 1024), (1, 2048, 2048)),
}
TRIPLETS = ((64, 192), (768, 192), (8, 512), (24, 1024), (4, 2048), (1, 5120))  # matrices, width
SMALL: dict[str, tuple[tuple[int, ...], ...]] = {
    "cholesky_ex": ((2, 16, 16),),
    "qr": ((2, 16, 4),),
    "eigh": ((2, 16, 16),),
    "svd": ((2, 16, 16),),
    "svdvals": ((2, 16, 16),),
}
SMALL_TRIPLETS = ((2, 96),)
LARGEST_FULL = 2048  # a full decomposition of 5120 x 5120 takes tens of seconds
K = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result."""
    from benchmarks.machine import environment, save

    given = parse("benchmarks.gpu.decompositions", __doc__, arguments)
    rows: list[dict[str, Any]] = []
    result = {"environment": environment(given.device), "rows": rows}
    for row in _rows(given.device, given.small):
        rows.append(row)
        save(result, given.out)
    return 0


def _rows(device: str, small: bool) -> Iterator[dict[str, Any]]:
    import torch

    from tracker.linalg.svd import top_singular_triplets

    for name, shapes in (SMALL if small else SIZES).items():
        function = getattr(torch.linalg, name)
        for shape in shapes:
            for dtype in (torch.float32, torch.float64):
                A = _matrices(name, shape, device, dtype)
                row = {"what": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
                yield {**row, **_times(partial(function, A), partial(_by_cpu, function, A), device)}
    for B, d in SMALL_TRIPLETS if small else TRIPLETS:
        J = torch.randn(B, d, d, device=device) / d**0.5
        for method in ("krylov", "full"):
            if method == "full" and d > LARGEST_FULL:
                continue
            taken = seconds(lambda J=J, method=method: top_singular_triplets(J, K, method), device, 1)
            yield {"what": f"top {K} triplets, {method}", "shape": [B, d, d], "dtype": "float32", "seconds": taken}


def _matrices(name: str, shape: tuple[int, ...], device: str, dtype: Any) -> "Tensor":
    import torch

    A = torch.randn(*shape, device=device, dtype=dtype)
    if name in ("eigh", "cholesky_ex"):
        A = A @ A.mT / shape[-1] + torch.eye(shape[-1], device=device, dtype=dtype)
    return A


def _by_cpu(function: Callable[["Tensor"], Any], A: "Tensor") -> Any:
    return [part.to(A.device) for part in function(A.cpu())]


def _times(on_device: Callable[[], Any], by_cpu: Callable[[], Any], device: str) -> dict[str, float]:
    times = {"seconds": seconds(on_device, device, 1)}
    if device != "cpu":
        times["seconds_by_cpu"] = seconds(by_cpu, device, 1)
    return times


if __name__ == "__main__":
    sys.exit(main())
