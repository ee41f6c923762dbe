"""Conversion of numbers to JSON."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def jsonable(value: Any) -> Any:
    """Convert numbers, arrays, and lists and mappings of them to JSON values; NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {key: jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [jsonable(entry) for entry in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
