"""The values that the page draws, JSON-able, from summaries of results. Undefined values are null.

Arrays are quantized: integers over each part's own range, in base64. A part is what the leading axes index: one step's
matrices, one matrix. Within it, value = low + code * span / (2^bits - 2), and the code 2^bits - 1 is an undefined value. 32
bits: float32 as they are.
"""

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xarray as xr

from tracker.analysis.across_models import jsonable
from tracker.analysis.curves import (
    USUAL,
    evenly_measured,
    inverse_fit,
    layers_in_words,
    middle_layers,
    onset_of,
)
from tracker.analysis.pairs import most_coupled
from tracker.analysis.variables import PAIRS, QUANTILES, evenly_spaced
from tracker.measures.declaration import NORMED
from tracker.measures.registry import KINDS, MEASURES, MISCOUPLINGS, VARIANTS
from tracker.store import by_step

TOLERANCE = 1e-4  # largest relative error of 16 bits; arrays that would exceed it are carried in 32


def pack(
    values: np.ndarray, bits: int, parts: int = 1, budget: int | None = None
) -> dict[str, Any]:
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
    packed = {"shape": list(values.shape), "parts": parts, "steps": kept}
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


def carried(data: Any) -> Iterator[dict[str, Any]]:
    """Yield every packed array in the page's data."""
    if isinstance(data, dict) and "codes" in data:
        yield data
        return
    for entry in data.values() if isinstance(data, dict) else data:
        if isinstance(entry, (dict, list)):  # most entries are numbers of a curve
            yield from carried(entry)


def _quantised(
    values: np.ndarray, bits: int, parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    flat = np.ma.masked_invalid(values.reshape(int(np.prod(values.shape[:parts])), -1))
    # A part without values has neither low nor span.
    low = flat.min(1).filled(0).astype("<f4")
    # float32 may round below the largest value: the span is a shade wider, so that no value is cut off.
    span = ((flat.max(1).filled(0) - low).clip(0) * (1 + 1e-6)).astype("<f4")
    largest = 2**bits - 2
    scale = np.divide(largest, span, out=np.zeros(len(span)), where=span > 0, dtype=float)
    codes = ((flat - low[:, None]) * scale[:, None]).round().clip(0, largest).filled(largest + 1)
    return codes.astype(f"<u{bits // 8}"), low, span


def _error(values: np.ndarray, again: np.ndarray) -> float:
    flat = values.reshape(again.shape)
    compared = np.isfinite(flat) & (flat != 0)
    return float((abs(again - flat)[compared] / abs(flat[compared])).max(initial=0))


def _affordable(count: int, size: int, budget: int | None) -> list[int]:
    if budget is None or count * size <= budget:
        return list(range(count))
    return evenly_spaced(count, max(2, budget // max(size, 1)))


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


# Bytes at most, of each kind in all
MATRICES, ABSOLUTE, TOKENS, PATHS = 6_500_000, 2_000_000, 1_500_000, 1_000_000
_PAIR = ("layer", "layer_other")
_TOKEN_PAIR = ("pair_token", "pair_token_other")


def contents(summarised: xr.Dataset) -> dict[str, Any]:
    """Return the values that the page shows of results summarised by step.

    Returns:
        By name of the measure, then K, then pairs: the curves with quartiles and null levels, the same numbers as
        `curves.curves`; matrices and other large arrays as `pack` returns them. What was not measured is null or empty.
    """
    ds = summarised
    ks = [int(k) for k in ds["k"].values] if "k" in ds.coords else []
    return {
        "steps": [int(step) for step in ds["step"].values],
        "even": evenly_measured(ds["step"].values),
        "suspect": [reason != "" for reason in by_step(ds, "suspect")],
        "layers": layers(ds),
        "ks": ks,
        "final_norm": str(ds.attrs["final_norm"]),
        "window": int(ds.attrs["window"]),
        **_couplings(ds, ks),
        "trajectory": _trajectory(ds),
        "depth": _by_depth(ds),
        "singular": _singular(ds),
        "score": _scores(ds),
        "absolute": _packed(ds, "matrix_absolute", (*_PAIR, "row", "column"), 8, 3, ABSOLUTE),
        "prompts": _prompts(ds, ks),
        **_across_tokens(ds, ks),
        "plane": _packed(ds, "pca_paths", ("path", "depth", "component"), 16, 1, PATHS),
        "noise": _noise(ds),
    }


def layers(ds: xr.Dataset) -> int:
    """Return the number of measured blocks."""
    return ds.sizes["layer"] if "layer" in ds.sizes else len(str(ds.attrs["blocks"]).split(", "))


def _couplings(ds: xr.Dataset, ks: Sequence[int]) -> dict[str, dict[str, dict[int, Any]]]:
    """Return what the page shows of pairs of blocks: by its name, that of the measure, and K."""
    names = [name for name in VARIANTS if f"{name}_matrix" in ds]
    parts = ("curves", "onset", "most_coupled", "matrices", "levels")
    data: dict[str, dict[str, dict[int, Any]]]
    data = {part: {name: {} for name in names} for part in parts}
    whole = [name for name in names if not name.endswith(NORMED)]
    budget = MATRICES // max(1, 2 * len(whole) * len(ks))
    for k in ks if names else ():
        # A selection is of every variable and takes milliseconds: it is made once, not for each measure.
        at = ds.sel(k=k)
        of_pairs = {pairs: at.sel(pairs=pairs) for pairs in PAIRS}
        for name in names:
            below = at[f"{name}_level"] - at[f"{name}_matrix"]
            found = onset_of(at, _coupling_of_prompts(at, name), below)
            data["curves"][name][k] = {pairs: _curve(of_pairs[pairs], name) for pairs in PAIRS}
            data["onset"][name][k] = jsonable(asdict(found))
            data["most_coupled"][name][k] = most_coupled(below.isel(step=-1), at) or (1, 2)
            packed = _matrices if name in whole else _edges
            data["matrices"][name][k] = packed(at, f"{name}_matrix", budget)
            data["levels"][name][k] = packed(at, f"{name}_level", budget)
    return data


def _curve(points: xr.Dataset, name: str) -> dict[str, list]:
    parts = {"value": "", "q25": "_q25", "q75": "_q75", "null": "_null"}
    return {part: _numbers(points[f"{name}{end}"]) for part, end in parts.items()}


def _coupling_of_prompts(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Return the coupling of each prompt, means over l != l'."""
    return ds[f"{name}_coupling_by_prompt"].sel(pairs="mean_offdiag")


def _matrices(at: xr.Dataset, name: str, budget: int) -> dict[str, Any] | None:
    """Pack matrices without a diagonal that is 0 by definition, which would widen the range of the codes."""
    apart = (at["layer"] != at["layer_other"]) | ("_vju_" in name)
    return _packed(at.assign({name: at[name].where(apart)}), name, _PAIR, 16, 1, budget)


def _edges(at: xr.Dataset, name: str, _: int) -> dict[str, Any]:
    """Pack the last row and column of matrices with the final norm, (step, 2, layer); the rest is that of the blocks alone."""
    matrices = at[name].transpose("step", *_PAIR).values
    edge = np.stack([matrices[:, -1], matrices[:, :, -1]], 1)
    # Their corner is on the diagonal, which would widen the range of the codes.
    edge[..., -1] = np.nan
    return {"of": name.partition(NORMED)[0], "edge": pack(edge, 16)}


def _packed(
    ds: xr.Dataset, name: str, dims: Sequence[str], bits: int, parts: int, budget: int | None
) -> dict[str, Any] | None:
    if name not in ds or not ds[name].size:
        return None
    return pack(ds[name].transpose("step", *dims).values, bits, parts, budget)


def _trajectory(ds: xr.Dataset) -> dict[str, dict[str, list]]:
    return {
        name: {str(s): _numbers(ds[name].sel(statistic=s)) for s in QUANTILES}
        for name in USUAL
        if name in ds and "statistic" in ds[name].dims
    }


def _by_depth(ds: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Return quartiles by depth of each measure, the first depth, and the depths at which a value is defined."""
    data = {}
    # `ds.get` looks for similar names where there is none, which takes a second in all.
    for measure in (measure for measure in MEASURES if f"{measure.name}_by_depth" in ds):
        values = ds[f"{measure.name}_by_depth"]
        axis = "depth" if "depth" in values.dims else "layer"
        values = values.transpose("statistic", "step", axis)
        at = values[axis].values
        defined = values.sel(statistic="median").notnull().any("step").values
        data[measure.name] = {
            "first": int(at[0]),
            "defined": at[defined].astype(int).tolist(),
            **{s: pack(values.sel(statistic=s).values, 32) for s in QUANTILES},
        }
    return data


def _singular(ds: xr.Dataset) -> dict[str, Any] | None:
    """Return medians by rank and block, and for each step the straight line of 1 / s_1 against depth (Figs 33, 34)."""
    if "singular_value_median" not in ds:
        return None
    values = ds["singular_value_median"].transpose("step", "rank", "layer").values
    fits = [inverse_fit(ds["layer"].values, s[0]) for s in values]
    lines = {part: [fit[part] for fit in fits] for part in ("n", "r2", "slope", "intercept")}
    ranks = [int(rank) for rank in ds["rank"].values]
    return {"ranks": ranks, "values": pack(values, 32), **jsonable(lines)}


def _scores(ds: xr.Dataset) -> dict[str, list]:
    if "score" not in ds:
        return {}
    return {str(task): _numbers(ds["score"].sel(task=task)) for task in ds["task"].values}


def _prompts(ds: xr.Dataset, ks: Sequence[int]) -> dict[str, Any]:
    coupling: dict[str, dict[int, Any]] = {}
    for name in MISCOUPLINGS:
        if f"{name}_matrix" in ds:
            values = _coupling_of_prompts(ds, name).transpose("k", "step", "prompt").values
            coupling[name] = {k: pack(of_k, 32) for k, of_k in zip(ks, values, strict=True)}
    return {
        "tokens": str(ds.attrs["tokens"]),
        "count": ds.sizes["prompt"],
        "lengths": ds["length"].max("step").values.astype(int).tolist() if "length" in ds else None,
        "texts": _texts(ds, "prompt_text"),
        "sources": _texts(ds, "prompt_source"),
        "difficulty": _numbers(ds["difficulty"]) if "difficulty" in ds.coords else None,
        "coupling": coupling,
    }


def _texts(ds: xr.Dataset, name: str) -> list[str] | None:
    texts = [str(text) for text in ds[name].values] if name in ds.coords else []
    return texts if any(texts) else None  # inputs that are no text have empty ones


def _across_tokens(ds: xr.Dataset, ks: Sequence[int]) -> dict[str, Any]:
    """Return what the page shows of pairs of tokens, by kind; which tokens, and which blocks' Jacobians were compared."""
    kinds = [kind for kind in KINDS if f"{kind}_{MISCOUPLINGS[0]}_matrix" in ds]
    if not kinds:
        return {"tokens": {}, "token_positions": None, "token_layers": None}
    budget = TOKENS // (len(kinds) * len(MISCOUPLINGS) * len(ks))
    others = ds["pair_layer_other"].values.tolist()
    of_layers = {
        "said": layers_in_words(ds).replace("'", "′"),
        # The basis block of each; none where it is NaN
        "others": [int(other) if math.isfinite(other) else None for other in others],
        "middle": middle_layers(ds)[0],  # |A| is of this block
    }
    return {
        "tokens": {kind: _of_kind(ds, kind, ks, budget) for kind in kinds},
        "token_positions": _positions(ds),
        "token_layers": of_layers,
    }


def _of_kind(ds: xr.Dataset, kind: str, ks: Sequence[int], budget: int) -> dict[str, Any]:
    data: dict[str, Any] = {"curves": {}, "matrices": {}}
    for name in MISCOUPLINGS:
        of = f"{kind}_{name}"
        if of not in ds:
            continue
        data["curves"][name], data["matrices"][name] = {}, {}
        for k in ks:
            at = ds.sel(k=k)
            dims = ("layer", *_TOKEN_PAIR)
            data["curves"][name][k] = _curve(at, of)
            data["matrices"][name][k] = _packed(at, f"{of}_matrix", dims, 16, 1, budget)
    dims = (*_TOKEN_PAIR, "row", "column")
    absolute = _packed(ds, f"{kind}_absolute", dims, 8, 3, TOKENS // 3)
    return data if absolute is None else data | {"absolute": absolute}


def _positions(ds: xr.Dataset) -> list[int] | None:
    """Return the positions of the compared tokens, where they are the same in all prompts."""
    values = ds["pair_position"].isel(step=0).values
    return [int(at) for at in values[0]] if (values == values[:1]).all() else None


def _noise(ds: xr.Dataset) -> dict[str, Any] | None:
    if "noise_similarity_ends" not in ds:
        return None
    similarity = ds["noise_similarity_ends"].transpose("step", "end", "noise")
    return {
        "levels": [float(level) for level in ds["noise"].values],
        "depths": [int(depth) for depth in similarity["end"].values],
        "values": _numbers(similarity),
    }


def _numbers(values: xr.DataArray) -> list:
    return jsonable(values.values)
