"""Which pairs of blocks count in means and tests.

    l = l'               in the paper's mean over all pairs alone: a Jacobian in its own basis has a mis-coupling of 0
    one module           where l = l' does: layers that call one module again are coupled by construction, however it is trained
    alike weights        everywhere, and the pairs are named: weights that begin as copies may become different

Where no other pair exists, as in ALBERT, the pairs of one module count, and are named.
"""

import numpy as np
import xarray as xr
from jaxtyping import Float
from numpy import ndarray

from tracker.analysis.onset import pairs_of_blocks
from tracker.analysis.regression import clustered_mean
from tracker.common.errors import UsageError
from tracker.common.text import join_names
from tracker.measures.equal_blocks import ATTRIBUTE, Group, read_equal_blocks
from tracker.store import attribute_values, by_step


def counted_pairs(results: xr.Dataset) -> xr.Variable:
    """Return |l − l'| of the pairs (layer, layer_other) that count where l = l' does not, 0 of others.

    Raises:
        UsageError: if some blocks were selected along one of both dimensions alone.
    """
    listed, others = (results.variables[dim].values.tolist() for dim in ("layer", "layer_other"))
    if listed != others:
        raise UsageError(
            f"pairs of blocks need the same blocks along layer {listed} and layer_other {others}; select both alike: "
            "results.sel(layer=[1, 2], layer_other=[1, 2])"
        )
    modules, layers = _modules(results), np.array(listed)
    of_two_modules = modules[:, None] != modules
    # Neighbours are pairs at distance 1, and the diagonal is at 0.
    distance = abs(layers[:, None] - layers)
    counted = distance * of_two_modules if of_two_modules.any() else distance
    return xr.Variable(("layer", "layer_other"), counted)


def where_counted(matrices: xr.DataArray, results: xr.Dataset) -> xr.DataArray:
    """Return values over (layer, layer_other), NaN for pairs that do not count."""
    return matrices.where(xr.DataArray(counted_pairs(results) > 0))


def independent_pairs(matrices: xr.DataArray, results: xr.Dataset) -> Float[ndarray, "*S pairs"]:
    """Return the mean of both directions of each pair of blocks, for tests over pairs.

    Layers that are one module have their directions in common: all pairs of the same two modules are one pair.
    """
    values = pairs_of_blocks(
        where_counted(matrices, results).transpose(..., "layer", "layer_other").values
    )
    if not has_one_module(results):
        return values
    of_layer = _modules(results)
    # The two modules of each pair, in one order: both directions are in its value already.
    both = np.sort(of_layer[np.stack(np.triu_indices(len(of_layer), 1))], 0)
    of_modules = [values[..., (both == pair[:, None]).all(0)] for pair in np.unique(both, axis=1).T]
    # The mean of those that count and are defined
    return np.stack([clustered_mean(alike)[0] for alike in of_modules], -1)


def most_coupled(departure: xr.DataArray, results: xr.Dataset) -> tuple[int, int] | None:
    """Return the pair of blocks that counts whose mean of both directions is largest; None where none is defined.

    Args:
        departure: null level minus mis-coupling (layer, layer_other).
    """
    counted = where_counted(departure, results).transpose("layer", "layer_other")
    pairs = pairs_of_blocks(counted.values)
    if not np.isfinite(pairs).any():
        return None
    # The order of `pairs_of_blocks`
    at = np.triu_indices(len(counted), 1)
    first, second = np.transpose(at)[np.nanargmax(pairs)]
    return int(counted["layer"][first]), int(counted["layer"][second])


def has_one_module(results: xr.Dataset) -> bool:
    """Whether layers are one module, at some step."""
    return any(group.one_module for group in _groups(results))


def is_one_module(results: xr.Dataset) -> bool:
    """Whether all blocks, of which there are several, are one module."""
    return results.sizes["layer"] > 1 and len(set(_modules(results))) == 1


def has_alike_weights(results: xr.Dataset) -> bool:
    """Whether different modules have alike weights, at some step."""
    return not all(group.one_module for group in _groups(results))


def describe_blocks(results: xr.Dataset) -> list[str]:
    """Say in sentences which blocks are coupled by construction: by one module, alike weights, at which steps, or norms."""
    steps = np.atleast_1d(results["step"].values) if "step" in results.coords else np.zeros(1)
    steps_of: dict[str, list[str]] = {}
    for step, text in zip(steps, by_step(results, ATTRIBUTE), strict=True):
        for sentence in _sentences(text, results.sizes["layer"]):
            steps_of.setdefault(sentence, []).append(f"{step:,}")
    sentences = []
    for sentence, at in steps_of.items():
        if len(at) < len(steps):
            sentence = f"At step{'s' * (len(at) > 1)} {join_names(at)}: {sentence}"
        sentences.append(sentence)
    if is_post_norm(results):
        sentences.append(
            "The state enters the blocks through norms alone, so that untrained blocks of this model are not at the null level "
            "either: compare with the same model untrained."
        )
    return sentences


def is_post_norm(results: xr.Dataset) -> bool:
    """Whether the state enters the blocks through norms alone, at some step: the null level is no baseline."""
    return "1" in attribute_values(results, "post_norm")


def _sentences(text: str, L: int) -> list[str]:
    found = read_equal_blocks(text)
    one = [group.layers for group in found if group.one_module]
    sentences = []
    if one == [list(range(1, L + 1))]:
        sentences.append(
            "All blocks are one module: they are coupled by construction, trained or not."
        )
    elif one:
        listed = "; ".join(map(join_names, one))
        sentences.append(
            f"Some blocks are one module ({listed}): they are coupled by construction, trained or not, and their pairs "
            "are left out of means and tests."
        )
    sentences += [
        f"Blocks {join_names(group.layers)} have alike weights, of {group.share} of their parameters, as copies or shared parts "
        "have: they are coupled by construction."
        for group in found
        if not group.one_module
    ]
    return sentences


def _groups(results: xr.Dataset) -> list[Group]:
    texts = attribute_values(results, ATTRIBUTE)
    return [group for text in texts for group in read_equal_blocks(text)]


def _modules(results: xr.Dataset) -> np.ndarray:
    """Return the first layer of each layer's module."""
    one_module = [group.layers for group in _groups(results) if group.one_module]
    first = {layer: group[0] for group in one_module for layer in group}
    layers = results.variables["layer"].values.astype(int).tolist()
    return np.array([first.get(layer, layer) for layer in layers])
