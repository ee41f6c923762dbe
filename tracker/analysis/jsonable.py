"""Numbers as JSON has them."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def jsonable(value: Any) -> Any:
    """Numbers, arrays, lists and dictionaries of them as JSON has them: null where a value is undefined."""
    if isinstance(value, Mapping):
        return {key: jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [jsonable(entry) for entry in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
