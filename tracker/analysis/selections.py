"""Results as all analyses take them: whole, or a part that a user selected, with the dimensions of their variables' declarations.

xarray drops a dimension of which one label is selected, and keeps the label as a coordinate without dimensions: here that is
a dimension of length 1. A Dataset from which a mean or another computation removed a dimension is refused.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from os import PathLike

import xarray as xr

from tracker.common.errors import UsageError
from tracker.common.text import join_names
from tracker.measures.declaration import COORDINATES
from tracker.measures.registry import DIMS
from tracker.store import GIVE, Result, attribute_values, open_results

DECLARED = {name: ("prompt", *dims) for name, dims in DIMS.items()}
DECLARED |= {name: coordinate.dims for name, coordinate in COORDINATES.items() if coordinate.dims}
LABELLED = (
    "k",
    "layer",
    "layer_other",
    "pair_token",
    "pair_token_other",
    "rank",
    "depth",
    "quantity",
)
# The coordinate that labels each dimension.
NEEDED = {dim: dim for dim in LABELLED}
NEEDED |= {"prompt": "prompt_text", "pair_token_other": "pair_layer_other"}
MAY_BE_EMPTY = ("quantity", "task")


def opened(result: Result) -> xr.Dataset:
    """Return a result with all dimensions of its variables, in their order; `step` is one if it was.

    Raises:
        FileNotFoundError: if a directory holds no results.
        UsageError: for what is no result, and for a Dataset of which a computation or a selection removed what analyses need.
    """
    if isinstance(result, str | PathLike):
        return open_results(result)
    if not isinstance(result, xr.Dataset):
        raise UsageError(f"{type(result).__name__} is no result; {GIVE}")
    if "model_class" not in result.attrs:
        raise UsageError(
            f"this Dataset without the attribute model_class lost its attributes in a computation, or is no result; {GIVE}"
        )
    if "step" in result.coords and result["step"].dtype.kind not in "iuf":
        raise UsageError(
            f"this result has step {result['step'].values.flat[0]}; steps are numbers: results.assign_coords(step=[0, 100])"
        )
    for dim, size in result.sizes.items():
        needed = NEEDED.get(str(dim), dim)
        if dim in NEEDED and needed not in result.coords:
            raise UsageError(
                f"this result has a dimension {dim} without the coordinate {needed}; give it with that coordinate"
            )
        if size == 0 and dim in COORDINATES and dim not in MAY_BE_EMPTY:
            raise UsageError(f"this selection has no {dim}; select one at least")
        # A prompt may be drawn several times: equal prompts are one cluster of intervals.
        if dim != "prompt" and dim in result.indexes and not result.indexes[dim].is_unique:
            repeated = result.indexes[dim][result.indexes[dim].duplicated()][0]
            raise UsageError(f"this selection has {dim} {repeated} more than once; select it once")
    dims = {str(name): _dims(result, str(name)) for name in result.variables if name in DECLARED}
    changed = {
        name: declared for name, declared in dims.items() if result.variables[name].dims != declared
    }
    if not changed:
        return result
    added = {dim for declared in changed.values() for dim in declared if dim not in result.dims}
    restored = {dim: result.variables[dim].set_dims({dim: 1}) for dim in added}
    for name, declared in changed.items():
        sizes = {dim: result.sizes.get(dim, 1) for dim in declared}
        restored[name] = result.variables[name].set_dims(sizes)
    coords = {name: values for name, values in restored.items() if name in result.coords}
    measured = {name: values for name, values in restored.items() if name not in coords}
    return result.drop_vars(coords).assign_coords(coords).assign(measured)


def with_steps(results: xr.Dataset, otherwise: float) -> xr.Dataset:
    """Return an opened result with a dimension `step`, whose label is `otherwise` where the result does not state its step."""
    if "step" in results.dims:
        return results
    return results.expand_dims("step" if "step" in results.coords else {"step": [otherwise]})


def require_labels(
    results: xr.Dataset | xr.DataArray, dim: str, labels: Sequence[int], of: str
) -> None:
    """Check that a part of results begins with these labels along a dimension, for what they are needed: `of`."""
    held = results.coords[dim].values.tolist()
    if held[: len(labels)] != list(labels):
        wanted = str(labels[0]) if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
        raise UsageError(
            f"{of} needs {dim} {wanted}, and this part of the results has {join_names(held)}"
        )


def require_names(names: Iterable[str], known: Iterable[str], of: str) -> None:
    """Check that names are among those known: each is that of a measure, say, which is `of`."""
    known = list(known)
    for name in names:
        if name not in known:
            similar = get_close_matches(name, known, n=3, cutoff=0)
            raise UsageError(f"{name!r} is no {of}; similar names are {', '.join(similar)}")


def number_of_blocks(results: xr.Dataset) -> int:
    """Return the number of blocks that were measured, of which results may be a part."""
    return attribute_values(results, "blocks")[0].count(", ") + 1


def as_selected(values: xr.DataArray, result: Result, name: str) -> xr.DataArray:
    """Return values of an opened result with the dimensions that its variable of this name had before it was opened."""
    if not isinstance(result, xr.Dataset):
        return values
    dims = result.variables[name].dims
    return values.isel({dim: 0 for dim in values.dims if dim not in dims}).transpose(*dims)


def _dims(result: xr.Dataset, name: str) -> tuple[str, ...]:
    """Return the dimensions that a variable is declared with, after `step` if it has that.

    Raises:
        UsageError: if the variable lacks one that is not a selected label, or has another.
    """
    held, declared = result.variables[name].dims, DECLARED[name]
    if "step" in held:
        declared = ("step", *declared)
    for dim in declared:
        selected = dim in result.coords and (dim not in result.dims or name in result.coords)
        if dim not in held and not selected:
            raise UsageError(
                f"{name} lacks the dimension {dim}: leave means to the analysis, and select one {dim} by "
                f"results.isel({dim}=0), which keeps its label"
            )
    for dim in held:
        if dim not in declared:
            raise UsageError(
                f"{name} has the dimension {dim}, on which no measurement of it depends; select by results.sel or "
                "results.isel, which add none, instead of where"
            )
    return declared
