"""The first eigenvectors of symmetric matrices, by LAPACK's `syevr`: the method of relatively robust representations.

It computes as many eigenvectors as are asked for; `torch.linalg.eigh` computes all, which takes 1.4 times as long in all for 10
of 192 to 50 of 512. SciPy's function keeps Python's lock, so that matrices would not share the cores. So LAPACK is called through
the addresses that `scipy.linalg.cython_lapack` offers to compiled code.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from scipy.linalg import cython_lapack  # type: ignore[attr-defined]
from torch import Tensor

from tracker.linalg.cores import batch_on_cores

ROUTINES = {torch.float32: ("ssyevr", ctypes.c_float), torch.float64: ("dsyevr", ctypes.c_double)}
ARGUMENTS = 21
FEW = 4  # threads that call SciPy's LAPACK at once


@cache
def _routine(name: str) -> Callable[..., None]:
    """Return a routine that takes addresses of its arguments."""
    api: Any = ctypes.pythonapi
    capsule = cython_lapack.__pyx_capi__[name]
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = (
        ctypes.c_char_p,
        [ctypes.py_object],
    )
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    # Which gives up Python's lock
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * ARGUMENTS)(address)


def first_eigenvectors(
    A: Float[Tensor, "B d d"], count: int
) -> tuple[Float[Tensor, "B count"], Float[Tensor, "B d count"]]:
    """Return the largest eigenvalues, falling, and their eigenvectors, of matrices in the host's memory; one matrix per core.

    Raises:
        RuntimeError: if LAPACK reports a failure.
    """
    if torch.get_num_threads() > FEW:
        # OpenBLAS, which SciPy brings, lets its callers wait for each other: 16 threads took 1.4 ms for each matrix of d = 192.
        values, vectors = batch_on_cores(torch.linalg.eigh, A)
        return values[..., -count:].flip(-1), vectors[..., -count:].flip(-1)
    values, vectors = batch_on_cores(lambda part: _decompose(part, count), A)
    return values, vectors


def _decompose(A: Float[Tensor, "B d d"], count: int) -> tuple[Tensor, Tensor]:
    name, scalar = ROUTINES[A.dtype]
    B, d, _ = A.shape
    values, vectors = A.new_empty(B, d), A.new_empty(B, count, d)  # LAPACK's columns are rows here
    n, first, computed, info = (ctypes.c_int(value) for value in (d, d - count + 1, 0, 0))
    bound = scalar(0)  # not read, or LAPACK's default
    support, of_work, of_integers = (
        (ctypes.c_int * (2 * count))(),
        ctypes.c_int(-1),
        ctypes.c_int(-1),
    )

    def run(matrix: int, W: int, Z: int, work: Any, integers: Any) -> None:
        options = (b"V", b"I", b"L")
        flags = [ctypes.cast(ctypes.c_char_p(flag), ctypes.c_void_p) for flag in options]
        width = ctypes.byref(n)
        interval = map(ctypes.byref, (bound, bound, first, n, bound, computed))
        workspaces = map(ctypes.byref, (work, of_work, integers, of_integers, info))
        _routine(name)(*flags, width, matrix, width, *interval, W, Z, width, support, *workspaces)
        if info.value:
            raise RuntimeError(f"LAPACK's {name} failed (info {info.value})")

    size, integers = scalar(0), ctypes.c_int(0)
    # Asks for the sizes of the workspaces
    run(A.data_ptr(), values.data_ptr(), vectors.data_ptr(), size, integers)
    of_work, of_integers = ctypes.c_int(int(size.value)), ctypes.c_int(integers.value)
    work, integers = (scalar * of_work.value)(), (ctypes.c_int * of_integers.value)()
    # It overwrites the matrix
    for own, matrix, W, Z in zip(A, A.clone(), values, vectors, strict=True):
        run(matrix.data_ptr(), W.data_ptr(), Z.data_ptr(), work, integers)
        if computed.value != count:
            # Of equal eigenvalues, as of a multiple of the identity, it may return too few vectors.
            every, columns = torch.linalg.eigh(own)
            W[:count], Z[:] = every[-count:], columns.mT[-count:]
    return values[:, :count].flip(-1), vectors.mT.flip(-1)
