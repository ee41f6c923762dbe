"""Tell errors of a device and failed allocations from errors of the code that runs on the device.

After most device errors (a failed kernel, a lost device) the process can compute nothing more on it, and the error is often
raised by a later call that has nothing to do with it. So no fallback and no further measurement may follow one. An allocation
that fails inside a library or on the CPU is raised as RuntimeError: it is treated as torch.OutOfMemoryError, after which a
smaller memory budget helps.
"""

import gc
import re
from typing import Any

import torch

_DEVICE = re.compile(
    r"\b(?:CUDA|HIP|XPU|MPS|NCCL|CUDA driver|cuDNN|MIOpen|cusolver|hipsolver|cuFFT|cusparse) error\b"
    r"|\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER)_STATUS_|\bmiopenStatus|\bUR_RESULT_ERROR_|\bTriton Error \[",
    re.IGNORECASE,
)
_ALLOCATION = re.compile(
    r"\w_ALLOC_FAILED\b|\bmiopenStatusAllocFailed\b|\bUR_RESULT_ERROR_OUT_OF_\w*MEMORY\b"
    r"|\b(?:CUDA|HIP|XPU|MPS)\b[^\n]{0,20}\bout of memory\b|\bDefaultCPUAllocator: (?:can't allocate|not enough) memory"
    # A library's handle is created at its first use, together with its workspace; without memory the creation fails.
    r"|_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)\b[^\n]*Create\w*\(",
    re.IGNORECASE,
)
# Refused; nothing was run
_UNSUPPORTED = re.compile(r"_STATUS_\w*NOT_SUPPORTED\b|_STATUS_ARCH_MISMATCH\b")


def is_allocation_failure(error: BaseException) -> bool:
    """Whether memory could not be allocated, on the device or on the CPU.

    >>> is_allocation_failure(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return _is_candidate(error) and bool(_ALLOCATION.search(str(error)))


def is_device_error(error: BaseException) -> bool:
    """Whether the device or one of its libraries failed, other than by an allocation.

    >>> is_device_error(RuntimeError("CUDA error: device-side assert triggered"))
    True
    >>> is_device_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if is_allocation_failure(error) or not _is_candidate(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return bool(_DEVICE.search(str(error))) and not _UNSUPPORTED.search(str(error))


def raise_device_errors(error: Exception) -> None:
    """Raise a device error as it is, and a failed allocation as torch.OutOfMemoryError; return after any other error."""
    if is_allocation_failure(error) and not isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(str(error)) from error
    if isinstance(error, torch.OutOfMemoryError) or is_device_error(error):
        raise error


def _is_candidate(error: BaseException) -> bool:
    # cuSOLVER's numerical failures are LinAlgErrors, with "cusolver error" in their text.
    numerical: Any = torch.linalg.LinAlgError  # type: ignore[attr-defined]
    return isinstance(error, RuntimeError) and not isinstance(error, numerical)


def release_memory(device: torch.device) -> None:
    """Free what a measurement that failed has left on a device. Its error must be gone, or have no traceback.

    The frames of the error may be part of reference cycles, and what they held is in the allocator's cache, in pieces.
    """
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
