"""A second device without hardware, for tests of device code: see device.cpp.

It is compiled once for each PyTorch version and source, into PyTorch's directory of extensions, and registered as "pretend".
"""

import hashlib
import os
import shutil
import subprocess
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock

NAME = "pretend"
SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
UNLIMITED = 2**63 - 1
TOTALS = ("launches", "syncs", "to_device", "to_host", "bytes_to_device", "bytes_to_host")


class NoCompilerError(RuntimeError):
    """The device cannot be compiled on this machine."""


@dataclass
class Counts:
    """The cost of a piece of code on the device.

    Attributes:
        launches: operators that ran on the device, including copies within the device.
        syncs: waits of the host for the device: for a value, for a size that depends on values, for a blocking copy.
        to_device: copies from the host.
        to_host: copies of tensors to the host. Reads of single values are counted in `syncs` alone.
        bytes_to_device: bytes of the copies from the host.
        bytes_to_host: bytes of the copies to the host.
        operators: calls by operator, such as "aten::mm".
    """

    launches: int = 0
    syncs: int = 0
    to_device: int = 0
    to_host: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    operators: Counter[str] = field(default_factory=Counter)


class PretendDevice:
    """The registered device with its counters, limits and planted failures."""

    def __init__(self):
        self.device = torch.device(NAME, 0)

    @contextmanager
    def count(self) -> Iterator[Counts]:
        """Count launches, waits and copies; the result is filled in at the end. Contexts cannot be nested."""
        counts = Counts()
        torch.ops.pretend.start_counting()
        try:
            yield counts
        finally:
            found = Counter(dict(torch.ops.pretend.stop_counting()))
            for name in TOTALS:
                setattr(counts, name, found[name])
            counts.operators.update(
                {name: number for name, number in found.items() if name.startswith("aten::")}
            )

    def live_bytes(self) -> int:
        """Return the bytes of all storages on the device."""
        return torch.ops.pretend.live_bytes()

    def peak_bytes(self) -> int:
        """Return the largest number of bytes since the last `reset_peak`."""
        return torch.ops.pretend.peak_bytes()

    def reset_peak(self):
        """Start a new peak at the present number of bytes."""
        torch.ops.pretend.reset_peak()

    @contextmanager
    def memory_limit(self, bytes: int) -> Iterator[None]:
        """Raise torch.OutOfMemoryError at allocations beyond this number of bytes in all."""
        torch.ops.pretend.set_limit(bytes)
        try:
            yield
        finally:
            torch.ops.pretend.set_limit(UNLIMITED)

    @contextmanager
    def failing(
        self,
        operator: str,
        after: int = 0,
        error: str = "CUDA error: unspecified launch failure",
        kind: Literal["accelerator", "out_of_memory", "runtime"] = "accelerator",
        sticky: bool = False,
    ) -> Iterator[None]:
        """Make one call of an operator raise, such as "aten::mm".

        Args:
            after: number of calls that succeed first.
            error: the message.
            kind: torch.AcceleratorError, torch.OutOfMemoryError or RuntimeError.
            sticky: whether all later operators fail too, as after an error of a CUDA kernel.
        """
        torch.ops.pretend.plant_failure(operator, after, error, kind, sticky)
        try:
            yield
        finally:
            torch.ops.pretend.remove_failures()

    @contextmanager
    def without_float64(self) -> Iterator[None]:
        """Refuse tensors in float64, as MPS does."""
        torch.ops.pretend.set_float64(False)
        try:
            yield
        finally:
            torch.ops.pretend.set_float64(True)

    @contextmanager
    def available(self) -> Iterator["PretendDevice"]:
        """Report the device as available, as PyTorch's and other libraries' searches for an accelerator ask."""
        torch.ops.pretend.set_available(True)
        try:
            yield self
        finally:
            torch.ops.pretend.set_available(False)


@cache
def load() -> PretendDevice:
    """Compile the device if need be, and register it in this process.

    Raises:
        NoCompilerError: if there is no C++ compiler.
    """
    torch.ops.load_library(str(_library()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.pretend.register_hooks()
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=None)
    return PretendDevice()


def _library() -> Path:
    """Return the compiled library."""
    compiler = (
        os.environ.get("CXX")
        or shutil.which("c++")
        or shutil.which("g++")
        or shutil.which("clang++")
    )
    key = hashlib.sha256(
        SOURCE.read_bytes() + repr((torch.__version__, FLAGS)).encode()
    ).hexdigest()[:16]
    root = Path(
        os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    )
    library = root / f"{NAME}_device" / f"{torch.__version__}-{key}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            if compiler is None:
                raise NoCompilerError(
                    "no C++ compiler is found (c++, g++, clang++ or $CXX); the pretend device needs one"
                )
            unfinished = library.with_suffix(".unfinished")
            installed = Path(torch.__file__).parent
            includes = [
                f"-I{installed / path}" for path in ("include", "include/torch/csrc/api/include")
            ]
            libraries = [f"-L{installed / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
            subprocess.run(
                [compiler, *FLAGS, *includes, str(SOURCE), "-o", str(unfinished), *libraries],
                check=True,
            )
            unfinished.rename(library)
    return library


def _device_module() -> types.ModuleType:
    """Return `torch.pretend`, the functions that PyTorch and Lightning call on an accelerator's module."""
    module, ops = types.ModuleType(f"torch.{NAME}"), torch.ops.pretend
    total = 80 << 30
    functions = {
        "is_available": ops.is_available,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: int(ops.is_available()),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: ops.synchronize(),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_rng_state": lambda device=0: ops.get_rng_state(),
        "set_rng_state": lambda state, device=0: ops.set_rng_state(state),
        "manual_seed": ops.manual_seed,
        "manual_seed_all": ops.manual_seed,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=0: ops.live_bytes(),
        "max_memory_allocated": lambda device=0: ops.peak_bytes(),
        "reset_peak_memory_stats": lambda device=0: ops.reset_peak(),
        "mem_get_info": lambda device=0: (
            min(ops.limit(), total) - ops.live_bytes(),
            min(ops.limit(), total),
        ),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
