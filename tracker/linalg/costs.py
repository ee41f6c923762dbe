"""Costs of finding singular triplets, by device: which method is expected to be faster, and how many matrices at once.

The unit of cost is an operation of LAPACK on one CPU core. The CPU's figures are measured: single steps by their time
relative to a product. For flat singular values, iteration and eigenvectors of J J^T take equally long at about d = 480 for
K = 10 and d = 720 for K = 50; eigenvectors take 0.3 to 0.5 of the time of a full decomposition.

The accelerators' are derived; on an H200 they chose the faster method, or one that takes a fifth longer (docs/gpu.md). Products
there cost next to nothing beside what stays with the host: launching them, some 27 launches of 5 us for a step of 16 columns,
and the small problems of each full basis, which the host's cores solve in float64 (eigh of J J^T takes half of the CPU's figure,
which is that of an SVD). Eigenvectors of J J^T are LAPACK's, on the same cores, and so is a full decomposition up to d = 512; for
larger matrices cuSOLVER takes them one by one.
"""

from dataclasses import dataclass

import torch

from tracker.linalg.krylov import basis_fits, basis_size, expected_columns

NARROWEST = 128  # width below which a full decomposition costs next to nothing
GROUP = 1 << 24  # scalars of the matrices that a CPU decomposes together: 64 MB in float32
# Arrays alive while a matrix is decomposed on an accelerator, counted: of its own size (copies, J J^T, the certificate's), and
# of its basis' size.
MATRICES, BASES = 5, 3


@dataclass(frozen=True)
class Costs:
    """Operations of the methods on one kind of device."""

    product: float  # of a column, times d^2
    basis: float  # of keeping a column orthogonal, times d m
    small: float  # of a column's share of the small problems, times m^2
    column: float  # of a column, beside the above
    square: float  # of J J^T, times d^3
    full: float  # of the full decomposition, times d^3
    symmetric: float  # of the eigenvectors of J J^T, times d^3


CPU = Costs(product=2.0, basis=4.0, small=100.0, column=1.5e6, square=1.5, full=25.0, symmetric=9.0)
ACCELERATOR = Costs(
    product=0.0, basis=0.0, small=50.0, column=5e5, square=0.0, full=25.0, symmetric=2.0
)


def costs_of(device: torch.device) -> Costs:
    """Return the costs on a device."""
    return CPU if device.type == "cpu" else ACCELERATOR


def krylov_is_cheaper(d: int, K: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products are expected to find K triplets of a (d, d) matrix faster than full decomposition."""
    cost = costs_of(device)
    return _iteration(d, K, dtype, device) + cost.square * d**3 < cost.full * d**3


def eigenvectors_are_cheaper(d: int, K: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether eigenvectors of J J^T are expected to take less time than an iteration and than full decomposition."""
    return _eigenvectors_suit(d, K) and (
        not basis_fits(d, K) or _iteration(d, K, dtype, device) >= costs_of(device).symmetric * d**3
    )


def decomposition(d: int, K: int, dtype: torch.dtype) -> float:
    """Return the operations of the cheapest way to K singular triplets of a (d, d) matrix on a CPU, and of J J^T."""
    ways = [CPU.full * d**3]
    if basis_fits(d, K):
        ways.append(_iteration(d, K, dtype, torch.device("cpu")))
    if _eigenvectors_suit(d, K):
        ways.append(CPU.symmetric * d**3)
    return min(ways) + CPU.square * d**3


def _eigenvectors_suit(d: int, K: int) -> bool:
    return d >= NARROWEST and K <= d // 4


def _iteration(d: int, K: int, dtype: torch.dtype, device: torch.device) -> float:
    cost, n, m = costs_of(device), expected_columns(d, K, dtype), basis_size(d, K)
    return n * (cost.product * d**2 + cost.basis * d * m + cost.small * m**2 + cost.column)


def matrices_at_once(d: int, K: int, dtype: torch.dtype, device: torch.device, memory: int) -> int:
    """Return how many (d, d) matrices to decompose together.

    Args:
        memory: bytes that may be taken for them. Each of a CPU's cores decomposes a group, and gains nothing from groups larger
            than `GROUP`.
    """
    each = (MATRICES * d**2 + BASES * d * max(0, basis_size(d, K))) * dtype.itemsize
    if device.type == "cpu":
        return max(1, min(GROUP // d**2, memory // torch.get_num_threads() // each))
    return max(1, memory // each)
