"""The undefined values of a measured Dataset: their counts, and a warning where most values of a measure are undefined."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from tracker.common.notices import warn_caller
from tracker.measures.registry import MEASURES

NAMED = 3  # measures that the warning names
VARIATIONS = ("expodistance", "equidistance")  # over depth: undefined in post-norm models, or for one block


def undefined_values(
    dataset: xr.Dataset, valid: Sequence[Sequence[int]], pair_layers: xr.DataArray | None
) -> dict[str, tuple[xr.DataArray, int]]:
    """Return, for each counted measure, which values are undefined, and how many values it has.

    What a shorter prompt lacks, and what a block without a basis block lacks across tokens, is no value.

    Args:
        valid: the positions of each prompt that are not padding.
        pair_layers: the basis block of each block across tokens; None if tokens are not compared.
    """
    expected: dict[str, xr.DataArray] = {}  # dimension -> whether a value is expected
    if "position" in dataset.dims:
        at = np.stack([np.isin(dataset["position"], of_prompt) for of_prompt in valid])
        expected["position"] = xr.DataArray(at, dims=("prompt", "position"))
    if "token_position" in dataset:
        expected["token"] = dataset["token_position"].notnull()
    if pair_layers is not None:
        t = dataset["pair_position"].notnull()
        expected["pair_token"] = t & t.rename(pair_token="pair_token_other") & pair_layers.notnull()
    found = {}
    for measure in MEASURES:
        for dim in measure.dims:
            if measure.counted and measure.name in dataset and dim in expected:
                values, has_value = dataset[measure.name], expected[dim]
                others = np.prod(
                    [values.sizes[other] for other in values.dims if other not in has_value.dims], dtype=int
                )
                found[measure.name] = values.isnull() & has_value, int(has_value.sum() * others)
    return found


def warn_of_undefined(dataset: xr.Dataset, found: dict[str, tuple[xr.DataArray, int]]) -> None:
    """Warn if states are not finite, or most values of a measure are undefined; name the first block where they are."""
    blocks = dataset.attrs["blocks"].split(", ")
    varies = len(blocks) > 1 and not dataset.attrs["post_norm"]
    most = {
        name: (undefined, total)
        for name, (undefined, total) in found.items()
        if 2 * int(undefined.sum()) > total and (varies or not name.startswith(VARIATIONS))
    }
    sentences = []
    if "norm" in dataset and (infinite := dataset["norm"] == np.inf).any():
        first = int(infinite.any([dim for dim in infinite.dims if dim != "depth"]).values.argmax())
        where = f"after block {first} ({blocks[first - 1]})" if first else "before block 1"
        total = int(dataset["norm"].notnull().sum())
        sentences.append(f"{int(infinite.sum())} of {total} norms of states are infinite, first {where}")
    if most:
        counts = [f"{int(undefined.sum())} of {total} of {name}" for name, (undefined, total) in most.items()]
        rest = f" and most of {len(counts) - NAMED} more measures" if len(counts) > NAMED else ""
        by_layer = next((undefined for undefined, _ in most.values() if "layer" in undefined.dims), None)
        first = "" if by_layer is None else f", first at block {_first(by_layer)} ({blocks[_first(by_layer) - 1]})"
        sentences.append(f"most values are undefined (NaN): {', '.join(counts[:NAMED])}{rest}{first}")
    if sentences:
        wider = "measure with dtype=torch.float64; if that changes nothing, " * (dataset.attrs["dtype"] != "float64")
        warn_caller(
            f"{'; '.join(sentences)}. Either numbers overflow or underflow, or a block adds nothing (zero weights), or its "
            f"Jacobian has a rank below K: {wider}check the weights, and choose a smaller k"
        )


def _first(undefined: xr.DataArray) -> int:
    """Return the first block with an undefined value; in pairs of blocks, with itself, so that the cause is not in the other."""
    if "layer_other" in undefined.dims:
        itself = undefined & (undefined["layer"] == undefined["layer_other"])
        undefined = itself if itself.any() else undefined
    return 1 + int(undefined.any([dim for dim in undefined.dims if dim != "layer"]).values.argmax())
