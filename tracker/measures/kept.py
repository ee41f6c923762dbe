"""Jacobians and singular vectors themselves, as `tracker.measure(..., keep=...)` returns them."""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tracker.capture.recording import Recording
from tracker.common.errors import UsageError
from tracker.measures.cost import size
from tracker.measures.layers import Layer
from tracker.measures.settings import Settings

KEPT = ("jacobian", "singular_vectors")


def with_kept(settings: Settings, keep: str | Sequence[str]) -> Settings:
    """Return the settings of a measurement that also keeps what is named.

    Raises:
        UsageError: for another name, or if no Jacobians of blocks are measured.
    """
    names = (keep,) if isinstance(keep, str) else tuple(keep) if isinstance(keep, Sequence) else (keep,)
    if set(names) - {*KEPT}:
        raise UsageError(f"keep={keep!r}; choose from {', '.join(KEPT)}")
    if names and not settings.includes("coupling"):
        raise UsageError(
            f"keep={keep!r}, but measures={settings.measures!r} needs no Jacobians of blocks; add 'coupling'"
        )
    return replace(settings, keep=names)


def check_kept(settings: Settings, recording: Recording, rows: int) -> None:
    """Check that the machine's memory holds what is kept at so many rows.

    Raises:
        UsageError: if it does not.
    """
    needed, available = kept_bytes(settings, recording, rows), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise UsageError(
            f"keep={settings.keep!r} takes {size(needed)} for {rows} tokens, and the machine has {size(available)}; keep the "
            "singular vectors alone, or measure fewer prompts or tokens at a time"
        )


def kept_bytes(settings: Settings, recording: Recording, rows: int) -> int:
    """Return the bytes of what is kept at so many rows; while samples are joined, there are two copies of it."""
    d, L = recording.calls[0].x.shape[-1], len(recording.calls)
    of_block = ("jacobian" in settings.keep) * d**2 + ("singular_vectors" in settings.keep) * 2 * d * max(
        settings.ks(d)
    )
    return 2 * rows * L * of_block * settings.torch_dtype.itemsize


def kept_arrays(layers: Sequence[Layer], keep: Sequence[str]) -> dict[str, np.ndarray]:
    """Return what is to be kept of every row and layer, in the host's memory: J over (row, layer, output, input), U and V."""
    arrays = {}
    if "jacobian" in keep:
        arrays["jacobian"] = np.stack([layer.jacobian().cpu().numpy() for layer in layers], 1)
    if "singular_vectors" in keep:
        for name, part in (("left_singular_vector", "U"), ("right_singular_vector", "V")):
            arrays[name] = np.stack([getattr(layer.triplets, part).cpu().numpy() for layer in layers], 1)
    return arrays
