"""Errors of a device are told from errors of the code that runs on it, and nothing takes them for something else."""

import gc

import pytest
import torch

import tracker
from tests.support.models import Size, language, tokens
from tracker.devices import is_allocation_failure, is_device_error, raise_device_errors
from tracker.jacobians.rows import Jacobians

FAILED_KERNEL = "CUDA error: unspecified launch failure"
NO_HANDLE = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
LinAlgError = torch.linalg.LinAlgError

ALLOCATIONS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError(
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com"
    ),
    RuntimeError(NO_HANDLE),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"
    ),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB, max allowed: 9.07 GB)."),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
    ),
    MemoryError("Unable to allocate 8.00 GiB for an array"),
]
DEVICE = [
    torch.AcceleratorError(FAILED_KERNEL),
    RuntimeError(FAILED_KERNEL),
    RuntimeError("CUDA driver error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    RuntimeError(
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnSsyevd(...)`"
    ),
    RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error"),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`"),
    RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    ),
    LinAlgError(
        "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED. This error may appear if the input matrix contains NaN."
    ),
    ValueError(FAILED_KERNEL),
]


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:70]


@pytest.mark.parametrize("error", ALLOCATIONS, ids=in_words)
def test_allocation_failures(error):
    assert is_allocation_failure(error) and not is_device_error(error)
    with pytest.raises(torch.OutOfMemoryError):
        raise_device_errors(error)


@pytest.mark.parametrize("error", DEVICE, ids=in_words)
def test_device_errors(error):
    assert is_device_error(error) and not is_allocation_failure(error)
    with pytest.raises(type(error)) as raised:
        raise_device_errors(error)
    assert raised.value is error


@pytest.mark.parametrize("error", OTHERS, ids=in_words)
def test_other_errors(error):
    assert not is_device_error(error) and not is_allocation_failure(error)
    raise_device_errors(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("svd", "operator"), [("full", "mm"), ("full", "_softmax"), ("krylov", "bmm")]
)
def test_a_planted_error_is_raised_wherever_it_happens(pretend, svd, operator):
    """Neither another path of Jacobians, nor one gradient per cotangent, nor a message on the model follows it."""
    # Wide enough for an iteration.
    model = language("GPTNeoXForCausalLM")(Size(width=64, depth=2, tokens=6)).to(pretend.device)

    def measure():
        tracker.measure(model, tokens(1, 6), k=2, svd=svd, measures="coupling")

    with pretend.count() as counts:
        measure()
    calls = counts.operators[f"aten::{operator}"]
    for after in (0, calls // 2, calls - 1):
        with pytest.raises(torch.AcceleratorError, match=FAILED_KERNEL):
            with pretend.failing(f"aten::{operator}", after):
                measure()
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED") as raised:
            with pretend.failing(f"aten::{operator}", after, NO_HANDLE, "runtime"):
                measure()
        assert is_allocation_failure(raised.value)


class WholeSequence(torch.nn.Module):
    """A block that does not run on single rows."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = x + self.linear(x).tanh()
        if x.shape[1] == 1:
            raise RuntimeError("this block needs its sequence")
        return y


@pytest.mark.filterwarnings("ignore")
def test_a_path_that_fails_leaves_no_tensors_to_the_next(pretend, monkeypatch):
    real, live = Jacobians._by_path, []

    def watched(*arguments, **keywords):
        live.append(pretend.live_bytes())
        return real(*arguments, **keywords)

    monkeypatch.setattr(Jacobians, "_by_path", watched)
    model = torch.nn.Sequential(WholeSequence(), WholeSequence()).to(pretend.device)
    x = torch.randn(1, 4, 8)
    gc.collect()
    gc.disable()
    try:
        found = tracker.measure(model, x, k=2, measures="coupling", blocks=["0", "1"])
    finally:
        gc.enable()
    assert not found.diagnostics_sliced.any()
    # The first block's two paths; indices of rows (48 bytes) are cached.
    assert len(live) == 4 and live[1] - live[0] < x.numel() * x.itemsize
