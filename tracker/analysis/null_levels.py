"""The null levels of mis-couplings, which are measured (`measures.rotations`) and read here, and how far chance moves them."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tracker.analysis.selections import as_selected, opened, require_labels
from tracker.analysis.variables import in_float64, labelled
from tracker.common.errors import UsageError
from tracker.common.text import join_names
from tracker.measures import coupling
from tracker.measures.coupling import (
    BY_ROTATIONS,
    LEVEL,
    OF_TRACE,
    Entries,
    Moments,
    Overlap,
    level_name,
)
from tracker.measures.dataset import compared_layers, compared_tokens
from tracker.measures.declaration import NORMED, Measure
from tracker.measures.registry import BY_NAME, KINDS
from tracker.store import Result

AT_ONCE = 1 << 20  # numbers of pairs and singular values at once
VALID = 9  # the spread holds for K <= d / 9
# Variables that hold the fields of `Moments`
OF_JACOBIANS = ("isotropic", "symmetric_norm", "antisymmetric_norm")
OF_BASES = {
    "alignment": "rank",
    "overlap_squares": "k",
    "overlap_fourths": "k",
}  # of `Overlap`, and the dimension of each
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
    missing = [level_variable(name)] if level_variable(name) not in results else []
    missing += _missing(results, name, ["singular_value"] * of_trace)
    _refuse(f"the null level of {name}", missing)
    values = in_float64(results, level_variable(name))
    if of_trace:
        values = values * _ratio_of_norms(results, measure)
    if measure.variant != "vju":
        compared = (
            compared_tokens(results) if measure.variant in KINDS else compared_layers(results)
        )
        values = values * compared
    return _as_measured(values, results.variables[name])


def _missing(results: xr.Dataset, name: str, parts: Sequence[str]) -> list[str]:
    """Return which of the variables that a mis-coupling's level may be computed from are not there."""
    start, end = _affixes(BY_NAME[name])
    return [part for part in (f"{start}{part}{end}" for part in parts) if part not in results]


def _refuse(what: str, missing: Sequence[str]) -> None:
    if missing:
        raise UsageError(
            f"{what} needs {join_names(missing)}, which this part of the results lacks; select them with it, or give the whole"
        )


def _affixes(measure: Measure) -> tuple[str, str]:
    """Return how the names begin and end of the variables that a variant's level is computed from."""
    return f"{measure.variant}_" * (measure.variant in KINDS), NORMED * (
        measure.variant == "normed"
    )


def level_variable(name: str) -> str:
    """Return the variable that holds the null level of a mis-coupling, or of the release's other norm.

    >>> level_variable("miscoupling_release_trace_normed"), level_variable("self_offdiag")
    ('miscoupling_release_level_normed', 'self_offdiag_level')
    """
    return level_name(name, BY_NAME[name].base or name)


def null_spread(results: Result, name: str = "miscoupling") -> xr.DataArray:
    """Return the standard deviation of the mis-coupling m_K of unrelated blocks, over rotations of one against the other.

    Prompts and tokens of one pair of blocks share the rotation: their mean varies as much as one of them.

    Args:
        name: "miscoupling", or a variant of it.

    Returns:
        As `null_level`.

    Raises:
        UsageError: for another name, or where K > d / 9, for which the formula does not hold.
    """
    given, results = results, opened(results)
    measure = BY_NAME.get(name)
    if measure is None or (measure.base or name) != "miscoupling" or name not in results:
        raise UsageError(
            f"the spread of {name!r} is not known; choose 'miscoupling', or draw rotations: coupling.simulated"
        )
    _refuse(
        f"the spread of {name}",
        _missing(results, name, ["singular_value", *OF_JACOBIANS, *OF_BASES]),
    )
    d, K = int(results.attrs["width"]), int(results["k"].max())
    if K * VALID > d:
        raise UsageError(
            f"the spread holds for K <= d / {VALID}, and K = {K}, d = {d}; select a smaller K, or draw rotations: "
            "coupling.simulated"
        )
    return as_selected(labelled(_spread(results, name), results), given, name)


def _spread(results: xr.Dataset, name: str) -> xr.Variable:
    """Return `coupling.spread` of every pair."""
    measure = BY_NAME[name]
    of_tokens = measure.variant in KINDS
    layers = results.variables["layer"].values.tolist()
    # The parts of levels are stored by block, and a pair needs those of both blocks.
    if not of_tokens and layers != results.variables["layer_other"].values.tolist():
        raise UsageError(
            "the results lack some blocks; compute the spread of all, and select blocks of what is returned"
        )
    start, end = _affixes(measure)
    core = ["layer", "pair_token"] if of_tokens else ["layer"]
    sample = [
        str(dim) for dim in results.variables[f"{start}isotropic{end}"].dims if dim not in core
    ]
    ks, d = results.variables["k"].values.tolist(), int(results.attrs["width"])

    def read(variable: str, *more: str) -> Tensor:
        """Read a variable as (sample, core, more)."""
        values = in_float64(results, f"{start}{variable}{end}").transpose(*sample, *core, *more)
        return torch.from_numpy(values.values.reshape(-1, *values.shape[len(sample) :]))

    require_labels(results, "rank", range(1, max(ks) + 1), "a spread")
    s, of = read("singular_value", "rank"), [read(name) for name in OF_JACOBIANS]
    basis = [read(name, along) for name, along in OF_BASES.items()]
    if of_tokens:
        # A pair is of a block and the vectors of its basis block.
        basis = [values[:, _basis_blocks(results)] for values in basis]
    # Each Jacobian is one side of as many pairs as there are bases, and a pair has all singular values.
    bases = s.shape[-2]
    at_once = max(1, AT_ONCE // (s[0].numel() * bases))
    evaluated = torch.empty(len(ks), len(s), *s.shape[1:-1], bases, dtype=torch.float64)
    for (i, k), at in product(enumerate(ks), range(0, len(s), at_once)):
        part = slice(at, at + at_once)
        moments = Moments(*(values[part] for values in of))
        overlap = Overlap(*(values[part] for values in basis)).at(i, k)
        evaluated[i, part] = coupling.spread(s[part, ..., :k], Entries(moments, overlap, d))
    other = "pair_token_other" if of_tokens else "layer_other"
    samples = [results.sizes[dim] for dim in sample]
    values = evaluated.reshape(len(ks), *samples, *evaluated.shape[2:]).numpy()
    if measure.variant != "vju":  # the last dimensions are those of `compared`
        compared = compared_tokens(results) if of_tokens else compared_layers(results)
        values[..., ~compared.values] = 0.0
    spread = xr.Variable(["k", *sample, *core, other], values)
    return _as_measured(spread, results.variables[name])


def _ratio_of_norms(results: xr.Dataset, measure: Measure) -> xr.Variable:
    """Return |s|_2 / |s|_1 of the top K singular values, for every K."""
    start, end = _affixes(measure)
    s, ks = in_float64(results, f"{start}singular_value{end}"), results.variables["k"]
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


def _basis_blocks(results: xr.Dataset) -> Tensor:
    """Return the index of the basis block of each block; its own where it has none, and no value."""
    layers = results.variables["layer"].values.tolist()
    bases = results["pair_layer_other"].values.tolist()
    # NaN, which is not equal to itself, where a block has no basis block
    return torch.tensor(
        [layers.index(int(m) if m == m else l) for l, m in zip(layers, bases, strict=True)]
    )
