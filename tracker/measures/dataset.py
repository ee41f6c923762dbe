"""From the samples' arrays to one labelled Dataset: dimensions, coordinates, padding, and counts of what is undefined."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from tracker.measures.coupling import MEASURES as COUPLINGS
from tracker.measures.coupling import VARIANTS

PAIR = ("token", "k", "layer", "layer_other")
TOKENS = ("k", "layer", "pair_token", "pair_token_other")  # in block `layer`, the basis in block `pair_layer_other`
TOKENWISE = ("self", "fixed_input", "fixed_output")
CERTIFICATE = ("residual", "complete", "formed", "full_svd", "sliced", "value_error", "derivative_error")
DIMS: dict[str, tuple[str, ...]] = {
    "token_position": ("token",),
    **{name: PAIR for name in COUPLINGS},
    **{f"{name}_null": PAIR[:-1] for name in COUPLINGS},
    **{f"{name}_vju": PAIR for name in COUPLINGS},
    **{f"{name}_raw": PAIR for name in COUPLINGS},
    **{f"{name}_raw_null": PAIR[:-1] for name in COUPLINGS},
    "matrix": ("token", "layer", "layer_other", "row", "column"),
    "pair_position": ("pair_token",),
    **{f"{kind}_{name}": TOKENS for kind in TOKENWISE for name in COUPLINGS},
    **{f"{kind}_{name}_null": TOKENS[:-1] for kind in TOKENWISE for name in COUPLINGS},
    **{f"{kind}_{name}": TOKENS[1:3] for kind in TOKENWISE for name in ("residual", "complete")},
    **{f"{kind}_singular_value": (*TOKENS[1:3], "rank") for kind in TOKENWISE},
    **{f"{kind}_matrix": (*TOKENS[1:], "row", "column") for kind in TOKENWISE},
    **{name + end: ("token", "layer", "rank") for end in ("", "_raw") for name in ("singular_value", "singular_gap")},
    **{name + end: ("token", "layer") for end in ("", "_raw") for name in CERTIFICATE},
    **dict.fromkeys(("lss", "expodistance", "expodistance_raw", "alpha_mean", "alpha_mean_raw"), ("position",)),
    **dict.fromkeys(("equidistance", "equidistance_raw"), ("position",)),
    **dict.fromkeys(("lss_window", "expodistance_window", "expodistance_raw_window"), ("layer", "position")),
    **dict.fromkeys(("equidistance_window", "equidistance_raw_window"), ("layer", "position")),
    **dict.fromkeys(("norm", "norm_raw", "entropy"), ("depth", "position")),
    "pca": ("depth", "position", "component"),
    "noise_similarity": ("noise", "depth", "position"),
}
FROM_ONE = ("layer", "layer_other", "rank", "row", "column", "component")
READ = ("entropy", "pca", "noise_similarity")
BY_POSITION = tuple(name for name, dims in DIMS.items() if dims == ("position",))


@dataclass
class Sample:
    """What was measured of one prompt or image, by variable name, with the dimensions in `DIMS`."""

    label: str  # a prompt's text, or nothing
    length: int
    tokens: list[int]
    ks: tuple[int, ...]
    noise: tuple[float, ...]  # levels
    attributes: dict[str, Any]  # the conventions resolved for it, the same for all samples of a measurement
    values: dict[str, Any] = field(default_factory=dict)
    fallbacks: dict[int, str] = field(default_factory=dict)  # layer -> why the full sequence served
    basis_layers: dict[int, int] = field(default_factory=dict)  # described -> lends its basis, across tokens

    def __post_init__(self) -> None:
        self.values["token_position"] = np.asarray(self.tokens, dtype=np.float32)

    def add_token(self, values: Mapping[str, np.ndarray]) -> None:
        """Append the measures of the next token."""
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)


def assemble(samples: Sequence[Sample]) -> xr.Dataset:
    """Stack the samples along `prompt`; positions and tokens that a shorter one lacks are NaN."""
    first = samples[0]
    labels = np.asarray([sample.label for sample in samples], dtype=object)
    pair_tokens = max(len(s.values.get("pair_position", ())) for s in samples)
    sizes = {"position": max(s.length for s in samples), "token": max(len(s.tokens) for s in samples)}
    sizes |= dict.fromkeys(("pair_token", "pair_token_other"), pair_tokens)
    variables = {
        name: (("prompt", *dims), np.stack([_padded(np.asarray(s.values[name]), dims, sizes) for s in samples]))
        for name, dims in DIMS.items()
        if name in first.values
    }
    dataset = xr.Dataset(variables, {"prompt_text": ("prompt", labels)})
    labelled = {"k": list(first.ks), "noise": list(first.noise)}
    counted = {dim: np.arange(size) + (dim in FROM_ONE) for dim, size in dataset.sizes.items()}
    dataset = dataset.assign_coords({dim: labelled.get(str(dim), count) for dim, count in counted.items()})
    if first.basis_layers:
        others = [first.basis_layers.get(int(l), np.nan) for l in dataset["layer"].values]
        dataset = dataset.assign_coords(pair_layer_other=("layer", np.asarray(others, dtype=np.float32)))
    dataset["undefined"] = _undefined(dataset)
    fallbacks = {layer: reason for sample in samples for layer, reason in sample.fallbacks.items()}
    dataset.attrs = {**first.attributes, "fallbacks": json.dumps(fallbacks)}
    if "formed" in dataset:  # of Jacobians known by their products alone nothing proves that no triplet was missed
        by_products = any(bool((dataset[name] == 0).any()) for name in ("formed", "formed_raw") if name in dataset)
        dataset.attrs["completeness"] = "probabilistic" if by_products else "exact"
    return dataset


def pair_layers(results: xr.Dataset) -> xr.DataArray:
    """Of results with token pairs, the block l' that lends the basis to each block l; NaN where none does.

    Results that were measured before l' could be chosen do not say it: there l' = l.
    """
    return results.coords["pair_layer_other" if "pair_layer_other" in results.coords else "layer"]


def _padded(value: np.ndarray, dims: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
    """Fill the ragged axes (positions, tokens) up with NaN."""
    missing = [(0, sizes.get(dim, length) - length) for dim, length in zip(dims, value.shape, strict=True)]
    if not any(after for _, after in missing):
        return value
    return np.pad(value.astype(np.result_type(value, np.float32)), missing, constant_values=np.nan)


def _undefined(dataset: xr.Dataset) -> xr.DataArray:
    """How many values of each measure are undefined, not counting what a shorter prompt lacks."""
    there: dict[str, xr.DataArray] = {}
    if "norm_raw" in dataset:
        there |= dict.fromkeys((*BY_POSITION, *READ), dataset["norm_raw"].isel(depth=0, drop=True).notnull())
    if "token_position" in dataset:
        there |= dict.fromkeys(VARIANTS, dataset["token_position"].notnull())
    if "pair_position" in dataset:
        compared = dataset["pair_position"].notnull()
        compared = compared & compared.rename(pair_token="pair_token_other") & pair_layers(dataset).notnull()
        there |= {f"{kind}_{name}": compared for kind in TOKENWISE for name in COUPLINGS}
    counts = {name: int((dataset[name].isnull() & where).sum()) for name, where in there.items() if name in dataset}
    return xr.DataArray(list(counts.values()), {"quantity": list(counts)}, "quantity")
