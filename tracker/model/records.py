"""Batches of any form: the parts that a batch is taken apart into, and what it holds, in words."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from reprlib import repr as shortened
from typing import Any

import numpy as np
from torch import Tensor, nn

from tracker.common.text import counted
from tracker.model.guard import SCALARS, attributes, is_data

ARRAYS = (np.ndarray, np.generic)


def named_parts(batch: Any) -> Mapping[Any, Any]:
    """Return the entries of a mapping, or the attributes of another record; those of anything else have no names."""
    return batch if isinstance(batch, Mapping) else attributes(batch) if is_record(batch) else {}


def is_texts(value: Any) -> bool:
    """Whether a value is a list or tuple of texts, without names."""
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return False
    return bool(value) and all(isinstance(entry, str) for entry in value)


def is_record(value: Any) -> bool:
    """Whether an object is taken apart by its attributes."""
    if isinstance(value, (Tensor, nn.Module, Enum, type, *ARRAYS, *SCALARS)) or not (
        held := attributes(value)
    ):
        return False
    return (
        is_dataclass(value)
        or isinstance(value, Mapping)
        or hasattr(value, "to")
        or is_data(value)
        or any(isinstance(entry, (Tensor, np.ndarray)) for entry in held.values())
    )


def describe(batch: Any) -> str:
    """Say what a batch holds: names, shapes and dtypes.

    >>> import torch
    >>> describe({"ids": torch.zeros(8, 5, dtype=torch.long), "texts": ["a", "b"], "scale": 0.5})
    '{ids: int64 (8, 5), texts: 2 texts, scale: 0.5}'
    """
    if isinstance(batch, (Tensor, *ARRAYS)):
        return f"{batch.dtype} {tuple(batch.shape)}".removeprefix("torch.")
    if is_texts(batch):
        return counted(len(batch), "text")
    if isinstance(batch, SCALARS):
        return shortened(batch)
    named = [f"{name}: {describe(entry)}" for name, entry in named_parts(batch).items()]
    if isinstance(batch, dict):
        return f"{{{', '.join(named)}}}"
    if isinstance(batch, (tuple, list)):
        listed = ", ".join(named or map(describe, batch))
        return f"[{listed}]" if isinstance(batch, list) else f"({listed})"
    return f"{type(batch).__name__}({', '.join(named)})" if named else type(batch).__name__
