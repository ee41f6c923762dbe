"""The values that the page draws, JSON-able, from summaries of results. Undefined values are null.

Arrays are quantized: integers over each part's own range, in base64. A part is what the leading axes index: one step's
matrices, one matrix. Within it, value = low + code * span / (2^bits - 2), and the code 2^bits - 1 is an undefined value. 32
bits: float32 as they are.
"""

import base64
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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
    sources,
    suspect,
)
from tracker.analysis.onset import onset
from tracker.analysis.pairs import independent_pairs, where_counted
from tracker.analysis.variables import PAIRS, evenly_spaced
from tracker.measures.declaration import NORMED
from tracker.measures.registry import KINDS, MEASURES, MISCOUPLINGS, VARIANTS

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


def carried(data: Any) -> Iterator[MutableMapping[str, Any]]:
    """Yield every packed array in the page's data."""
    if isinstance(data, MutableMapping) and "codes" in data:
        yield data
    elif isinstance(data, (Mapping, list)):
        for entry in data.values() if isinstance(data, Mapping) else data:
            yield from carried(entry)


def _quantised(
    values: np.ndarray, bits: int, parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    flat = values.reshape(int(np.prod(values.shape[:parts])), -1)
    finite = np.isfinite(flat)
    low = np.where(finite, flat, np.inf).min(1, initial=np.inf)
    high = np.where(finite, flat, -np.inf).max(1, initial=-np.inf)
    # A part without values has neither low nor span.
    low = np.where(np.isfinite(low), low, 0).astype("<f4")
    # float32 may round below the largest value: the span is a shade wider, so that no value is cut off.
    span = (np.maximum(np.where(np.isfinite(high), high, 0) - low, 0) * (1 + 1e-6)).astype("<f4")
    scale = np.where(span > 0, (2**bits - 2) / np.where(span > 0, span, 1).astype(float), 0)
    codes = np.clip(
        np.round((np.where(finite, flat, 0) - low[:, None]) * scale[:, None]), 0, 2**bits - 2
    )
    return np.where(finite, codes, 2**bits - 1).astype(f"<u{bits // 8}"), low, span


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


def contents(summarised: xr.Dataset) -> dict[str, Any]:
    """Return the values that the page shows of results summarised by step.

    Returns:
        By name of the measure, then K, then pairs: the curves with quartiles and null levels, the same numbers as
        `curves.curves`; matrices and other large arrays as `pack` returns them.
    """
    ds = summarised
    names = [name for name in VARIANTS if f"{name}_matrix" in ds]
    whole = [name for name in names if not name.endswith(NORMED)]
    kinds = [kind for kind in KINDS if f"{kind}_{MISCOUPLINGS[0]}_matrix" in ds]
    ks = [int(k) for k in ds["k"].values] if "k" in ds.coords else []
    budget = MATRICES // max(1, 2 * len(whole) * len(ks))
    # Each is a selection of every variable, which takes milliseconds: made once, not for each measure.
    of_k = {k: ds.sel(k=k) for k in ks}
    of_pairs = {
        (k, pairs): at.sel(pairs=pairs) for k, at in of_k.items() if names for pairs in PAIRS
    }
    data: dict[str, Any] = {
        "steps": [int(step) for step in ds["step"].values],
        "even": evenly_measured(ds["step"].values),
        "suspect": [reason != "" for reason in suspect(ds)],
        "layers": layers(ds),
        "ks": ks,
        "final_norm": str(ds.attrs["final_norm"]),
        "window": int(ds.attrs["window"]),
        "curves": {
            name: {k: {pairs: _curve(of_pairs[k, pairs], name) for pairs in PAIRS} for k in ks}
            for name in names
        },
        "onset": {name: {k: _onset(of_k[k], name) for k in ks} for name in names},
        "most_coupled": {name: {k: _most_coupled(of_k[k], name) for k in ks} for name in names},
        **{
            of: {
                name: {
                    k: (_matrices if name in whole else _edges)(
                        of_k[k], f"{name}_{of_each}", budget
                    )
                    for k in ks
                }
                for name in names
            }
            for of, of_each in (("matrices", "matrix"), ("levels", "level"))
        },
        "trajectory": {
            name: {str(s): _numbers(ds[name].sel(statistic=s)) for s in ds["statistic"].values}
            for name in USUAL
            if name in ds and "statistic" in ds[name].dims
        },
        "depth": {m.name: _by_depth(ds, m.name) for m in MEASURES if f"{m.name}_by_depth" in ds},
        "singular": _singular(ds) if "singular_value_median" in ds else None,
        "score": {str(task): _numbers(ds["score"].sel(task=task)) for task in ds["task"].values}
        if "score" in ds
        else {},
        "absolute": _packed(ds, "matrix_absolute", (*_PAIR, "row", "column"), 8, 3, ABSOLUTE)
        if "matrix_absolute" in ds
        else None,
        "prompts": _prompts(ds, names, ks),
        "tokens": {
            kind: _tokens(ds, kind, ks, TOKENS // (len(kinds) * len(MISCOUPLINGS) * len(ks)))
            for kind in kinds
        },
        "token_positions": _positions(ds) if kinds else None,
        "token_layers": _token_layers(ds) if kinds else None,
        "plane": _packed(ds, "pca_paths", ("path", "depth", "component"), 16, 1, PATHS)
        if "pca_paths" in ds
        else None,
        "noise": _noise(ds) if "noise_similarity_ends" in ds else None,
    }
    return data


_PAIR = ("layer", "layer_other")
_TOKEN_PAIR = ("pair_token", "pair_token_other")


def layers(ds: xr.Dataset) -> int:
    """Return the number of measured blocks."""
    return ds.sizes["layer"] if "layer" in ds.sizes else len(str(ds.attrs["blocks"]).split(", "))


def _curve(points: xr.Dataset, name: str) -> dict[str, list]:
    return {
        "value": _numbers(points[name]),
        **{part: _numbers(points[f"{name}_{part}"]) for part in ("q25", "q75", "null")},
    }


def _onset(at: xr.Dataset, name: str) -> dict[str, Any]:
    """Return the onset of the curve over l != l'."""
    departure = _coupling(at, name).transpose("step", "prompt").values
    matrices = (at[f"{name}_level"] - at[f"{name}_matrix"]).transpose("step", *_PAIR)
    pairs = independent_pairs(matrices, at)
    return jsonable(asdict(onset(at["step"].values, departure, pairs, sources(at))))


def _most_coupled(at: xr.Dataset, name: str) -> list[int]:
    """Return the pair of different blocks (l, l') furthest below its null level at the last step; (1, 2) if none is defined."""
    coupling = (
        where_counted(at[f"{name}_level"] - at[f"{name}_matrix"], at)
        .isel(step=-1)
        .transpose(*_PAIR)
        .values
    )
    coupling[~np.isfinite(coupling)] = -np.inf
    l, other = np.unravel_index(coupling.argmax(), coupling.shape)
    return [int(l) + 1, int(other) + 1] if np.isfinite(coupling.max()) else [1, 2]


def _matrices(at: xr.Dataset, name: str, budget: int) -> dict[str, Any]:
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
    ds: xr.Dataset,
    name: str,
    dims: Sequence[str],
    bits: int,
    parts: int,
    budget: int | None,
) -> dict:
    return pack(ds[name].transpose("step", *dims).values, bits, parts, budget)


def _by_depth(ds: xr.Dataset, name: str) -> dict[str, Any]:
    values = ds[f"{name}_by_depth"]
    axis = "depth" if "depth" in values.dims else "layer"
    by_statistic = {
        str(s): values.sel(statistic=s).transpose("step", axis).values
        for s in values["statistic"].values
    }
    defined = [
        int(at)
        for at in values[axis].values[values.sel(statistic="median").notnull().any("step").values]
    ]
    return {
        "first": int(values[axis][0]),
        "defined": defined,
        **{s: pack(v, 32) for s, v in by_statistic.items()},
    }


def _singular(ds: xr.Dataset) -> dict[str, Any]:
    """Return medians by rank and block, and for each step the straight line of 1 / s_1 against depth (Figs 33, 34)."""
    values = ds["singular_value_median"].transpose("step", "rank", "layer").values
    fits = [inverse_fit(ds["layer"].values, s[0]) for s in values]
    return {
        "ranks": [int(rank) for rank in ds["rank"].values],
        "values": pack(values, 32),
        **{
            part: jsonable([fit[part] for fit in fits])
            for part in ("n", "r2", "slope", "intercept")
        },
    }


def _prompts(ds: xr.Dataset, names: Sequence[str], ks: Sequence[int]) -> dict[str, Any]:
    coupling = {
        name: {
            k: pack(_coupling(ds.sel(k=k), name).transpose("step", "prompt").values, 32) for k in ks
        }
        for name in MISCOUPLINGS
        if name in names
    }
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


def _coupling(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Return the coupling of each prompt, means over l != l'."""
    return ds[f"{name}_coupling_by_prompt"].sel(pairs="mean_offdiag")


def _tokens(ds: xr.Dataset, kind: str, ks: Sequence[int], budget: int) -> dict[str, Any]:
    data: dict[str, Any] = {"curves": {}, "matrices": {}}
    for name in (name for name in MISCOUPLINGS if f"{kind}_{name}" in ds):
        of = f"{kind}_{name}"
        data["curves"][name], data["matrices"][name] = {}, {}
        for k in ks:
            at = ds.sel(k=k)
            data["curves"][name][k] = _curve(at, of)
            data["matrices"][name][k] = _packed(
                at, f"{of}_matrix", ("layer", *_TOKEN_PAIR), 16, 1, budget
            )
    if f"{kind}_absolute" in ds:
        data["absolute"] = _packed(
            ds, f"{kind}_absolute", (*_TOKEN_PAIR, "row", "column"), 8, 3, TOKENS // 3
        )
    return data


def _token_layers(ds: xr.Dataset) -> dict[str, Any]:
    """Return which blocks' Jacobians were compared across tokens: the basis block of each, and the block that |A| is of."""
    others = [
        int(other) if math.isfinite(other) else None for other in ds["pair_layer_other"].values
    ]
    return {
        "said": layers_in_words(ds).replace("'", "′"),
        "others": others,
        "middle": middle_layers(ds)[0],
    }


def _positions(ds: xr.Dataset) -> list[int] | None:
    """Return the positions of the compared tokens, where they are the same in all prompts."""
    values = ds["pair_position"].isel(step=0).values
    return [int(at) for at in values[0]] if (values == values[:1]).all() else None


def _noise(ds: xr.Dataset) -> dict[str, Any]:
    similarity = ds["noise_similarity_ends"].transpose("step", "end", "noise")
    return {
        "levels": [float(level) for level in ds["noise"].values],
        "depths": [int(depth) for depth in similarity["end"].values],
        "values": _numbers(similarity),
    }


def _numbers(values: xr.DataArray) -> list:
    """Return nested lists with null where a value is undefined."""
    return jsonable(np.asarray(values.values))
