"""From the samples' arrays to one labelled Dataset: dimensions, coordinates, padding, and counts of what is undefined."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from tracker.measures.registry import BY_NAME, COORDINATES, DIMS, MEASURES

FROM_ONE = ("layer", "layer_other", "rank", "row", "column", "component")


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
    dataset = _described(dataset)
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
    """Count the undefined values of each measure, not counting what a shorter prompt lacks."""
    expected: dict[str, xr.DataArray] = {}  # by dimension: where a value is expected
    if "norm_raw" in dataset:
        expected["position"] = dataset["norm_raw"].isel(depth=0, drop=True).notnull()
    if "token_position" in dataset:
        expected["token"] = dataset["token_position"].notnull()
    if "pair_position" in dataset:
        t = dataset["pair_position"].notnull()
        expected["pair_token"] = t & t.rename(pair_token="pair_token_other") & pair_layers(dataset).notnull()
    counts = {
        measure.name: int((dataset[measure.name].isnull() & expected[dim]).sum())
        for measure in MEASURES
        if measure.counted and measure.name in dataset
        for dim in measure.dims
        if dim in expected
    }
    return xr.DataArray(list(counts.values()), {"quantity": list(counts)}, "quantity")


def _described(dataset: xr.Dataset) -> xr.Dataset:
    """Give every variable and coordinate its label and unit."""
    for name, values in dataset.variables.items():
        measure = BY_NAME.get(str(name))
        label, unit = (measure.label, measure.unit) if measure else (COORDINATES[str(name)], "1")
        values.attrs = {"long_name": label, "units": unit}
    return dataset
