"""The labelled Dataset of a measurement: dimensions, coordinates, padding, and counts of undefined values.

The variables asked for come first, in the order in which `measures=` names them: the main ones, then the rest. Scores,
positions and diagnostics follow. Attributes are `long_name`, `units`, `formula` and `reference`. A warning says where most values
of a measure are undefined.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import xarray as xr

from tracker.common.errors import warn_caller
from tracker.measures.declaration import COORDINATES, DIAGNOSTICS, Coordinate, Measure
from tracker.measures.registry import BY_NAME, DIMS, MEASURES, UNDEFINED
from tracker.measures.settings import CHOICE_NAMES
from tracker.measures.states import NOISE

NAMED = 3  # measures that the warning names
# Over depth: undefined in post-norm models, or for one block.
VARIATIONS = ("expodistance", "equidistance")


def undefined_values(
    dataset: xr.Dataset, valid: Sequence[Sequence[int]], pair_layers: xr.Variable | None
) -> dict[str, tuple[xr.Variable, int]]:
    """Return, for each counted measure, which values are undefined, and how many values it has.

    What a shorter prompt lacks, and what a block without a basis block lacks across tokens, is no value.

    Args:
        valid: the positions of each prompt that are not padding.
        pair_layers: the basis block of each block across tokens; None if tokens are not compared.
    """
    # Not DataArrays: their indexes are the same, and comparing them takes most of the time.
    variables = dataset.variables
    expected: dict[str, xr.Variable] = {}  # dimension -> whether a value is expected
    if "position" in dataset.dims:
        positions = dataset["position"].values
        at = np.stack([np.isin(positions, of_prompt) for of_prompt in valid])
        expected["position"] = xr.Variable(("prompt", "position"), at)
    if "token_position" in variables:
        expected["token"] = variables["token_position"].notnull()
    if pair_layers is not None:
        other = dataset["pair_position"].rename(pair_token="pair_token_other").variable
        both = variables["pair_position"].notnull() & other.notnull()
        expected["pair_token"] = both & pair_layers.notnull()
    counts = {}
    for measure in MEASURES:
        if not measure.counted or measure.name not in variables:
            continue
        values = variables[measure.name]
        for dim in measure.dims:
            if dim in expected:
                has_value = expected[dim]
                rest = [size for other, size in values.sizes.items() if other not in has_value.dims]
                count = int(has_value.values.sum()) * prod(rest)
                undefined = xr.Variable(values.dims, np.isnan(values.values))
                counts[measure.name] = undefined & has_value, count
    return counts


def warn_of_undefined(dataset: xr.Dataset, counts: dict[str, tuple[xr.Variable, int]]) -> None:
    """Warn if states are not finite, or most values of a measure are undefined; name the first block where they are."""
    blocks = dataset.attrs["blocks"].split(", ")
    most = {}
    for name, (undefined, total) in counts.items():
        # A variation over depth has no value where nothing varies: that is no fault of the measurement.
        if 2 * int(undefined.values.sum()) > total and not name.startswith(VARIATIONS):
            most[name] = undefined, total
    sentences = []
    infinite = dataset.variables["norm"] == np.inf if "norm" in dataset else None
    if infinite is not None and infinite.values.any():
        first = int(infinite.any([dim for dim in infinite.dims if dim != "depth"]).values.argmax())
        where = f"after block {first} ({blocks[first - 1]})" if first else "before block 1"
        total = int(dataset.variables["norm"].notnull().sum())
        sentences.append(
            f"{int(infinite.sum())} of {total} norms of states are infinite, first {where}"
        )
    if most:
        listed = [
            f"{int(nan.values.sum())} of {total} of {name}" for name, (nan, total) in most.items()
        ]
        rest = f" and most of {len(listed) - NAMED} more measures" if len(listed) > NAMED else ""
        by_layer = [undefined for undefined, _ in most.values() if "layer" in undefined.dims]
        first = ""
        if by_layer:
            block = _first(by_layer[0], dataset)
            first = f", first at block {block} ({blocks[block - 1]})"
        sentences.append(
            f"most values are undefined (NaN): {', '.join(listed[:NAMED])}{rest}{first}"
        )
    if sentences:
        wider = "measure with dtype=torch.float64; if that changes nothing, " * (
            dataset.attrs["dtype"] != "float64"
        )
        warn_caller(
            f"{'; '.join(sentences)}. Either numbers overflow or underflow, or a block adds nothing (zero weights), or its "
            f"Jacobian has a rank below K: {wider}check the weights, and choose a smaller k"
        )


def _first(undefined: xr.Variable, dataset: xr.Dataset) -> int:
    """Return the first block with an undefined value; in pairs of blocks, with itself, so that the cause is not in the other."""
    if "layer_other" in undefined.dims:
        itself = undefined & ~compared_layers(dataset)
        undefined = itself if itself.any() else undefined
    return 1 + int(undefined.any([dim for dim in undefined.dims if dim != "layer"]).values.argmax())


ADDED = ("long_name", "units", "formula", "reference")
MAIN, REST, OTHERS, POSITIONS, LAST = range(5)  # groups of variables, in their order


def labelled(dataset: xr.Dataset) -> xr.Dataset:
    """Return a measured Dataset with its variables in order and described; others keep their attributes."""
    asked = str(dataset.attrs.get("measures", "")).split(", ")
    asked = [*(name for name in asked if name in CHOICE_NAMES), *CHOICE_NAMES]
    in_registry = {name: i for i, name in enumerate(BY_NAME)}

    def place(name: str) -> tuple[int, int, int]:
        measure = BY_NAME.get(name)
        option = asked.index(measure.option) if measure and measure.option in asked else 0
        if name.startswith(DIAGNOSTICS):
            group = LAST
        elif measure is None:
            group = OTHERS
        elif name in ("token_position", "pair_position"):
            group = POSITIONS
        elif measure.main and (not measure.base or measure.option == "tokenwise"):
            group = MAIN
        else:
            group = REST
        return group, option, in_registry.get(name, len(in_registry))

    names = sorted(map(str, dataset.data_vars), key=place)
    variables = {name: dataset.variables[name].copy(deep=False) for name in names}
    ordered = xr.Dataset(variables, dataset.coords.copy(), dataset.attrs)
    for name, values in ordered.variables.items():
        if described := _described(name):
            added = described.label, described.unit, described.formula, described.reference
            values.attrs |= dict(zip(ADDED, added, strict=True))
    return ordered


def unlabelled(dataset: xr.Dataset) -> xr.Dataset:
    """Return a Dataset without the attributes that `labelled` adds, which are a quarter of the size of a small file."""
    plain = dataset.copy()
    for name, values in plain.variables.items():
        if _described(name):
            values.attrs = {key: value for key, value in values.attrs.items() if key not in ADDED}
    return plain


def _described(name: Hashable) -> Measure | Coordinate | None:
    return BY_NAME.get(str(name)) or COORDINATES.get(str(name))


FROM_ONE = ("layer", "layer_other", "rank", "exponent", "row", "column", "component")


@dataclass
class Sample:
    """The measured arrays of one prompt or image, by variable name, with the dimensions in `DIMS`.

    Attributes:
        label: the text of a prompt; "" if there is none.
        token_texts: the text of each token of a prompt; empty if there is none.
        ids: the token ids that the model received; None if it received none.
        attributes: the resolved conventions, equal for all samples of a measurement.
        valid: the positions that are not padding.
        notes: attribute of the Dataset -> layer -> text. `fallbacks`: why its Jacobians were evaluated over the full sequence;
            `independent_checks`: what agrees with its Jacobian where differences of values do not or can't be used.
        random_seed: of the random numbers that the sample's forward pass drew; None if it drew none.
        basis_layers: block l -> basis block l', across tokens.
        digest: a hash of its inputs, without padding; 0 where they are not known by themselves.
    """

    label: str
    length: int
    tokens: list[int]
    ks: tuple[int, ...]
    attributes: dict[str, Any]
    valid: Sequence[int]
    values: dict[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    basis_layers: dict[int, int] = field(default_factory=dict)
    token_texts: Sequence[str] = ()
    ids: np.ndarray | None = None
    random_seed: int | None = None
    digest: int = 0

    def __post_init__(self) -> None:
        self.values["token_position"] = np.asarray(self.tokens, dtype=np.float32)

    def add_token(self, values: Mapping[str, np.ndarray]) -> None:
        """Append the measures of the next token."""
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)


def assemble(samples: Sequence[Sample]) -> xr.Dataset:
    """Stack the samples along `prompt`; positions and tokens that a shorter sample lacks are NaN."""
    variables = _stacked(samples)
    # All coordinates at once: joined to a Dataset one by one, they are aligned with all the others each time.
    dataset = xr.Dataset(variables, _indices(samples[0], variables) | _of_prompts(samples))
    basis_layers = dataset.variables["pair_layer_other"] if "pair_position" in dataset else None
    undefined = undefined_values(dataset, [sample.valid for sample in samples], basis_layers)
    counts = [int(values.values.sum()) for values, _ in undefined.values()]
    quantities = xr.Dataset({UNDEFINED: ("quantity", counts)}, {"quantity": list(undefined)})
    dataset = dataset.merge(quantities)
    dataset.attrs = _attributes(samples)
    warn_of_undefined(dataset, undefined)
    return dataset


Stacked = dict[str, tuple[tuple[str, ...], np.ndarray]]  # dimensions and values by name


def _stacked(samples: Sequence[Sample]) -> Stacked:
    """Return the variables of all samples, padded to the longest."""
    pair_tokens = max(len(sample.values.get("pair_position", ())) for sample in samples)
    sizes = {
        "position": max(sample.length for sample in samples),
        "token": max(len(sample.tokens) for sample in samples),
        "pair_token": pair_tokens,
        "pair_token_other": pair_tokens,
    }
    measured = samples[0].values
    variables: Stacked = {}
    for name, dims in DIMS.items():
        if name in measured:
            padded = [_pad(np.asarray(sample.values[name]), dims, sizes) for sample in samples]
            variables[name] = ("prompt", *dims), np.stack(padded)
    return variables


def _indices(first: Sample, variables: Stacked) -> dict[str, Any]:
    """Return the coordinates along the dimensions of the variables."""
    named = {"k": list(first.ks), "noise": list(NOISE)}
    indices: dict[str, Any] = {}
    for dims, values in variables.values():
        for dim, size in zip(dims, values.shape, strict=True):
            # Blocks and ranks are counted from 1, as in the paper, and positions from 0.
            counted = np.arange(size) + (dim in FROM_ONE)
            indices[dim] = named.get(dim, counted)
    if first.basis_layers:
        others = [first.basis_layers.get(int(l), np.nan) for l in indices["layer"]]
        indices["pair_layer_other"] = "layer", np.asarray(others, dtype=np.float32)
    return indices


def _of_prompts(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the coordinates along `prompt`: texts, hashes of the inputs, seeds."""
    labels = np.asarray([sample.label for sample in samples], dtype=object)
    coordinates: dict[str, Any] = {"prompt_text": ("prompt", labels)}
    if any(sample.token_texts for sample in samples):
        longest = max(sample.length for sample in samples)
        texts = np.full((len(samples), longest), "", dtype=object)
        for row, sample in zip(texts, samples, strict=True):
            row[: len(sample.token_texts)] = sample.token_texts
        coordinates["token_text"] = ("prompt", "position"), texts
    digests = np.array([sample.digest for sample in samples], dtype=np.int64)
    # A digest of 0 is an input that is not known by itself, which intervals must not take for a repeated one.
    if digests.all():
        coordinates["prompt_digest"] = "prompt", digests
    if any(sample.random_seed is not None for sample in samples):
        seeds = [-1 if sample.random_seed is None else sample.random_seed for sample in samples]
        coordinates["random_seed"] = "prompt", np.asarray(seeds, dtype=np.int64)
    return coordinates


def _attributes(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the attributes: conventions, whether random numbers were drawn, and notes of layers as JSON."""
    first = samples[0]
    drew = any(sample.random_seed is not None for sample in samples)
    attributes = {**first.attributes, "random_draws": int(drew)}
    for name in first.notes:
        notes = {layer: text for sample in samples for layer, text in sample.notes[name].items()}
        attributes[name] = json.dumps(notes)
    return attributes


def compared_layers(results: xr.Dataset) -> xr.Variable:
    """Return which pairs (layer, layer_other) are of two blocks."""
    return results.variables["layer"] != results.variables["layer_other"]


def compared_tokens(results: xr.Dataset) -> xr.Variable:
    """Return which token pairs of each layer count in a mean: all, as in the paper, except a Jacobian in its own basis.

    The exception is t = t' where l' = l: 0 by definition. Where l' is another block, t = t' is a pair like the others.
    """
    variables = results.variables
    same_block = variables["pair_layer_other"] == variables["layer"]
    same_token = variables["pair_token"] == variables["pair_token_other"]
    return ~(same_block & same_token)


def _pad(value: np.ndarray, dims: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
    """Pad the axes of positions and tokens with NaN to their sizes."""
    missing = [
        (0, sizes.get(dim, length) - length) for dim, length in zip(dims, value.shape, strict=True)
    ]
    if not any(after for _, after in missing):
        return value
    # Booleans and integers have no NaN.
    return np.pad(value.astype(np.result_type(value, np.float32)), missing, constant_values=np.nan)
