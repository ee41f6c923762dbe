"""Quantized arrays of the page: integers over each part's own range, in base64.

A part is what the leading axes index: one step's matrices, one matrix. Within it, value = low + code * span / (2^bits - 2), and
the code 2^bits - 1 is an undefined value. 32 bits: float32 as they are.
"""

import base64
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

TOLERANCE = 1e-4  # largest relative error of 16 bits; arrays that would exceed it are carried in 32


def pack(values: np.ndarray, bits: int = 16, parts: int = 1, budget: int | None = None) -> dict[str, Any]:
    """Pack an array whose first axis is steps, JSON-able.

    Args:
        bits: 8, 16, or 32.
        parts: how many leading axes index the parts.
        budget: bytes that the codes may take; where they would take more, evenly spaced steps are kept, the first and last
            among them.

    Returns:
        bits, shape, parts; codes, low, span in base64; steps: the indices of those kept; error: the largest relative error.
    """
    values = np.asarray(values, dtype=float)
    whole, kept = values, _affordable(values.shape[0], values[:1].size * bits // 8, budget)
    values = values[kept]
    packed = {"shape": list(values.shape), "parts": parts, "steps": kept.tolist()}
    if bits != 32:
        codes, low, span = _quantised(values, bits, parts)
        error = _error(values, unpack_parts(codes, low, span, bits))
        if bits == 8 or error <= TOLERANCE:
            carried = {"codes": _base64(codes), "low": _base64(low), "span": _base64(span)}
            return packed | {"bits": bits, "error": error} | carried
        return pack(whole, 32, parts, budget)
    return packed | {"bits": 32, "error": 2.0**-24, "codes": _base64(values.astype("<f4"))}


def unpack_parts(codes: np.ndarray, low: np.ndarray, span: np.ndarray, bits: int) -> np.ndarray:
    """Return the values of codes (parts, entries), as the page computes them."""
    values = low[:, None].astype(float) + codes * (span[:, None].astype(float) / (2**bits - 2))
    return np.where(codes == 2**bits - 1, np.nan, values)


def carried(data: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield every packed array in the page's data."""
    if isinstance(data, MutableMapping) and "codes" in data:
        yield data
    elif isinstance(data, Mapping):
        for entry in data.values():
            yield from carried(entry)
    elif isinstance(data, list):
        for entry in data:
            yield from carried(entry) if isinstance(entry, (Mapping, list)) else ()


def _quantised(values: np.ndarray, bits: int, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    flat = values.reshape(int(np.prod(values.shape[:parts])), -1)
    there = np.isfinite(flat)
    low = np.where(there, flat, np.inf).min(1, initial=np.inf)
    high = np.where(there, flat, -np.inf).max(1, initial=-np.inf)
    low = np.where(np.isfinite(low), low, 0).astype("<f4")
    # float32 may round below the largest value: the span is a shade wider, so that no value is cut off.
    span = (np.maximum(np.where(np.isfinite(high), high, 0) - low, 0) * (1 + 1e-6)).astype("<f4")
    scale = np.where(span > 0, (2**bits - 2) / np.where(span > 0, span, 1).astype(float), 0)
    codes = np.clip(np.round((np.where(there, flat, 0) - low[:, None]) * scale[:, None]), 0, 2**bits - 2)
    return np.where(there, codes, 2**bits - 1).astype(f"<u{bits // 8}"), low, span


def _error(values: np.ndarray, again: np.ndarray) -> float:
    flat = values.reshape(again.shape)
    there = np.isfinite(flat) & (flat != 0)
    return float((abs(again - flat)[there] / abs(flat[there])).max(initial=0))


def _affordable(count: int, size: int, budget: int | None) -> np.ndarray:
    if budget is None or count * size <= budget:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, max(2, budget // max(size, 1))).round().astype(int))


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
