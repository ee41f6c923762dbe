"""Results as plain data: a tidy table with a row for each value, for pandas, polars and CSV; numbers for JSON."""

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from os import PathLike
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.null_levels import null_level
from tracker.common.errors import UsageError
from tracker.measures.registry import BY_NAME
from tracker.store.results import open_results

ROWS = 50_000_000  # at most
POSITIONS = {  # a dimension that is an index: the variable of the position in the sequence that it stands for
    "token": "token_position",
    "pair_token": "pair_position",
    "pair_token_other": "pair_position",
}


def to_frame(
    results: xr.Dataset | str | PathLike[str], of: str | Sequence[str] = "miscoupling", null: bool = True
) -> pd.DataFrame:
    """Return variables of a Dataset as a tidy table, a row for each combination of their dimensions.

    `results.to_dataframe()` combines the dimensions of all variables: hundreds of millions of rows of a small store.

    Args:
        results: a Dataset of `measure` or `open_results`, or a part of one; or a store or its directory.
        of: a variable, or several with the same dimensions, such as ["lss", "expodistance", "alpha_mean"].
        null: add the null level of each mis-coupling, as the column NAME_null.

    Returns:
        Columns: the dimensions, such as step, prompt, token, k, layer and layer_other, with `token_position`, the position of the
        token in its sequence, beside the index `token`; then the variables. Rows without any value, which shorter
        prompts lack, are left out; in other rows an undefined value is NaN.

    Raises:
        UsageError: for a name that is not in the Dataset, variables with different dimensions, or more than 50 million rows.
    """
    results = open_results(results) if isinstance(results, str | PathLike) else results
    names = [of] if isinstance(of, str) else list(of)
    known = list(map(str, results.data_vars))
    if unknown := [name for name in names if name not in known]:
        alike = ", ".join(get_close_matches(unknown[0], known, n=3, cutoff=0))
        raise UsageError(f"{unknown[0]!r} is not in the results; print(results) lists what is, such as {alike}")
    dims = {name: sorted(map(str, results[name].dims)) for name in names}
    if len(set(map(tuple, dims.values()))) != 1:
        listed = "; ".join(f"{name}: {', '.join(of_name)}" for name, of_name in dims.items()) or "none was given"
        raise UsageError(f"variables of one table need the same dimensions ({listed}); make a table of each kind")
    values = results[names[0]]
    if values.size > ROWS:
        raise UsageError(
            f"{values.size:,} rows are too many; select first, such as results.sel(k=10) or results.isel(step=-1)"
        )
    columns = {name: results[name] for name in names}
    if null:
        with_level = [name for name in names if name in BY_NAME and BY_NAME[name].null]
        columns |= {f"{name}_null": null_level(results, name).astype(values.dtype) for name in with_level}
    measured = list(columns)
    positions = {index: name for index, name in POSITIONS.items() if index in values.dims and name in results}
    for index, name in positions.items():
        columns[f"{index}_position"] = results[name].rename(dict(zip(results[name].dims[-1:], [index], strict=True)))
    parts = {name: values.reset_coords(drop=True) for name, values in columns.items()}
    order = [str(dim) for dim in results.sizes if dim in values.dims]
    table = xr.Dataset(parts).to_dataframe(order).dropna(how="all", subset=measured).reset_index()
    for index in positions:
        at = table.pop(f"{index}_position").astype(int)
        table.insert(list(table.columns).index(index) + 1, at.name, at)
    for name in ("k", "step"):  # of which one was selected
        if name in results.coords and not results[name].dims:
            table.insert(0, name, results[name].item())
    return table


def jsonable(value: Any) -> Any:
    """Convert numbers, arrays, and lists and mappings of them to JSON values; NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {key: jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [jsonable(entry) for entry in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
