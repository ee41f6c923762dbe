"""The null levels of mis-couplings, which are measured (`measures.rotations`) and read here."""

import numpy as np
import xarray as xr

from tracker.analysis.selections import as_selected, opened, require_labels
from tracker.analysis.variables import in_float64, labelled
from tracker.common.errors import UsageError
from tracker.common.text import join_names
from tracker.measures.coupling import (
    BY_ROTATIONS,
    LEVEL,
    OF_TRACE,
    level_name,
)
from tracker.measures.dataset import compared_layers, compared_tokens
from tracker.measures.declaration import NORMED, Measure
from tracker.measures.registry import BY_NAME, KINDS
from tracker.store import Result

MEASURED = tuple(f"{name}{LEVEL}" for name in BY_ROTATIONS)
# All variables of the levels of layer pairs
READ = ("singular_value", *MEASURED)


def null_level(results: Result, name: str) -> xr.DataArray:
    """Return the null level of a mis-coupling: the value that unrelated blocks would give, on average.

    Args:
        results: a Dataset of `measure` or `open_results`, or a part of one; or a store or its directory.
        name: a mis-coupling of the Dataset, such as "miscoupling", "offdiag_normalized_normed" or "self_miscoupling".

    Returns:
        Values with the dimensions of `results[name]`: NaN where that is, and 0 for a Jacobian in its own basis, where the
        mis-coupling is 0 by definition (not with swapped sides, `_vju`).

    Raises:
        UsageError: for another name, or for a part without what the level is read from.
    """
    whole = opened(results)
    return as_selected(labelled(levels(whole, name), whole), results, name)


def levels(results: xr.Dataset, name: str) -> xr.Variable:
    """Return the null levels of `null_level` without coordinates, which takes a tenth of the time."""
    measure = BY_NAME.get(name)
    if measure is None or not measure.null or name not in results:
        known = [str(of) for of in results.data_vars if of in BY_NAME and BY_NAME[str(of)].null]
        raise UsageError(
            f"{name!r} has no null level that can be computed here; choose from {', '.join(known) or 'none'}"
        )
    of_trace = (measure.base or name) == OF_TRACE
    # The level of the release's other norm is measured but for a ratio of norms of singular values.
    needed = [level_variable(name), *[_singular_value(measure)] * of_trace]
    if missing := [part for part in needed if part not in results]:
        raise UsageError(
            f"the null level of {name} needs {join_names(missing)}, which this part of the results lacks; select them with "
            "it, or give the whole"
        )
    values = in_float64(results, level_variable(name))
    if of_trace:
        values = values * _ratio_of_norms(results, measure)
    if measure.variant != "vju":
        compared = (
            compared_tokens(results) if measure.variant in KINDS else compared_layers(results)
        )
        values = values * compared
    return _as_measured(values, results.variables[name])


def _singular_value(measure: Measure) -> str:
    """Return the variable of the singular values of the Jacobians of a mis-coupling."""
    start = f"{measure.variant}_" if measure.variant in KINDS else ""
    return f"{start}singular_value{NORMED if measure.variant == 'normed' else ''}"


def level_variable(name: str) -> str:
    """Return the variable that holds the null level of a mis-coupling, or of the release's other norm.

    >>> level_variable("miscoupling_release_trace_normed"), level_variable("self_offdiag")
    ('miscoupling_release_level_normed', 'self_offdiag_level')
    """
    return level_name(name, BY_NAME[name].base or name)


def _ratio_of_norms(results: xr.Dataset, measure: Measure) -> xr.Variable:
    """Return |s|_2 / |s|_1 of the top K singular values, for every K."""
    s, ks = in_float64(results, _singular_value(measure)), results.variables["k"]
    require_labels(results, "rank", range(1, int(ks.max()) + 1), "a null level")
    ranks = xr.Variable("rank", np.arange(1, s.sizes["rank"] + 1))
    s = s * (ranks <= ks)
    norm = s.sum("rank", skipna=False)
    # A block that adds nothing has singular values of 0, and no ratio.
    return (s**2).sum("rank", skipna=False) ** 0.5 / norm.where(norm > 0)


def _as_measured(levels: xr.Variable, measured: xr.Variable) -> xr.Variable:
    """Return levels with the dimensions of a mis-coupling, NaN where that is."""
    levels = levels.transpose(*measured.dims)
    return xr.Variable(levels.dims, np.where(np.isnan(measured.values), np.nan, levels.values))
