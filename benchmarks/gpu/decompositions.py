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

Shapes = dict[str, tuple[tuple[int, ...], ...]]

SIZES: Shapes = {  # (matrices, rows, columns), cheap ones first
    "cholesky_ex": ((768, 192, 192), (8, 256, 256), (1, 1024, 1024), (8, 1024, 1024), (1, 5120, 5120)),
    "qr": ((64, 192, 20), (24, 1024, 16), (36, 5120, 16)),
    "eigh": ((768, 40, 40), (24, 32, 32), (24, 100, 100), (500, 100, 100), (36, 160, 160)),
    "triplets by krylov": ((64, 192, 192), (768, 192, 192), (8, 512, 512), (24, 1024, 1024), (1, 5120, 5120)),
    "triplets by full": ((64, 192, 192), (8, 512, 512), (2, 1024, 1024), (1, 2048, 2048)),
    "svd": ((768, 20, 20), (64, 192, 192), (24, 200, 200), (8, 512, 512), (1, 1024, 1024)),
}
SMALL: Shapes = {name: ((2, 96, 96),) for name in SIZES}
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

    for name, shapes in (SMALL if small else SIZES).items():
        for shape in shapes:
            for dtype in (torch.float32, torch.float64):
                row = {"what": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
                yield row | _times(name, _matrices(name, shape, device, dtype))


def _times(name: str, A: "Tensor") -> dict[str, float]:
    """Return the seconds on the device and, for PyTorch's own functions, by the CPU with the copies there and back."""
    import torch

    from tracker.linalg.svd import top_singular_triplets

    if name.startswith("triplets by "):
        method: Any = name.removeprefix("triplets by ")
        return {"seconds": seconds(lambda: top_singular_triplets(A, K, method), A.device.type, 1, 1)}
    function = getattr(torch.linalg, name)
    times = {"seconds": seconds(lambda: function(A), A.device.type, 1, 1)}
    if A.device.type != "cpu":
        by_cpu = partial(_by_cpu, function, A)
        times["seconds_by_cpu"] = seconds(by_cpu, A.device.type, 1, 1)
    return times


def _matrices(name: str, shape: tuple[int, ...], device: str, dtype: Any) -> "Tensor":
    import torch

    A = torch.randn(*shape, device=device, dtype=dtype) / shape[-1] ** 0.5
    if name in ("eigh", "cholesky_ex"):
        A = A @ A.mT + torch.eye(shape[-1], device=device, dtype=dtype)
    return A


def _by_cpu(function: Callable[["Tensor"], Any], A: "Tensor") -> Any:
    return [part.to(A.device) for part in function(A.cpu())]


if __name__ == "__main__":
    sys.exit(main())
