"""Provenance of a result: the model, the software and the machine, as attributes."""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from tracker.common.errors import UsageError
from tracker.devices import raise_device_errors
from tracker.version import SCHEMA, __version__


def describe(model: nn.Module, device: torch.device) -> dict[str, str | int]:
    """Return the model, which has no wrapper around it, versions, device and time as attributes."""
    config = getattr(model, "config", None)
    return {
        "schema": SCHEMA,
        "tracker_version": __version__,
        **{
            f"{name}_version": package_version(name)
            for name in ("torch", "transformers", "numpy", "xarray")
        },
        "python_version": platform.python_version(),
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model_name": str(getattr(config, "name_or_path", "") or ""),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_dtype": ", ".join(
            sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
        ),
        "attention": str(getattr(config, "_attn_implementation", "") or ""),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


_version = cache(version)  # reading metadata takes 1 ms


def package_version(name: str) -> str:
    """Return the version of a package from its metadata or, where it has none, from the imported module."""
    try:
        return _version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "unknown"))


def usable_device(device: torch.device | str, argument: str) -> torch.device:
    """Return the device, with its index if it has one, after a test computation on it.

    Tensors state their index, and "cuda" is not equal to "cuda:0". Each thread has its own current device.

    Raises:
        UsageError: if it can't be used or has no float64; `argument` is the caller's argument as text.
    """
    try:
        zero = torch.zeros(1, device=device)
        # An accelerator reports some faults only where a result is read.
        zero.item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"{argument} can't be used ({str(error).splitlines()[0]})") from error
    device = zero.device
    if not has_float64(device):
        raise UsageError(
            f"{argument} can't be used: {device.type} has no float64, in which Jacobians are checked and small ones computed; "
            "measure on the CPU, wherever the model is"
        )
    return device


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64: MPS and some XPUs do not."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum().item()
    except (TypeError, RuntimeError) as error:
        raise_device_errors(error)
        return False
    return True


def settings_digest(identity: Any) -> str:
    """Return a short hash of the settings that identify a store."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def digest(inputs: Any) -> str:
    """Return a hash of inputs: prompts, or tensors in mappings, tuples and lists."""
    sha = hashlib.sha256()
    _update(sha, inputs)
    return sha.hexdigest()


def _update(sha: Any, inputs: Any) -> None:
    if isinstance(inputs, Tensor):
        sha.update(f"{inputs.dtype}{tuple(inputs.shape)}".encode())
        sha.update(inputs.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(inputs, (Mapping, list, tuple)):
        for name, value in inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs):
            # NUL ends each text, so that "a", "bc" and "ab", "c" have different hashes.
            sha.update(f"{name}\0".encode())
            _update(sha, value)
    else:
        sha.update(f"{inputs}\0".encode())
