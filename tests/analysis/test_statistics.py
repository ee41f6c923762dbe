"""Curve points against plain loops over the Dataset."""

import numpy as np
import pytest
import torch
import xarray as xr

import tracker
from tests.support.models import neox, padded, tokens
from tests.support.refused import refused
from tests.support.stores import stored
from tracker.analysis.curves import CURVES, curves, layers_in_words, middle_layers, scalars, sources
from tracker.analysis.null_levels import null_level
from tracker.analysis.reduction import reduced
from tracker.measures.registry import MEAN_OFFDIAG
from tracker.model.inputs import Batch
from tracker.store import open_results


@pytest.fixture(scope="module")
def ds():
    return tracker.measure(neox(), tokens(3), k=[2, 4], tokens=[0, -1])


def test_a_text_is_the_name_of_one_measure(ds):
    assert curves(ds, "lss").identical(curves(ds, ["lss"]))
    with refused("'lsss' is no measure; similar names are lss, "):
        curves(ds, "lsss")


def test_scalars_are_the_curve_points_under_flat_names(ds):
    flat, points = scalars(ds), curves(ds)
    assert flat["miscoupling/miscoupling/k4/mean_offdiag"] == float(
        points.miscoupling.sel(k=4, pairs="mean_offdiag")
    )
    assert flat["trajectory/lss/median"] == float(points.lss.sel(statistic="median"))
    assert all(isinstance(value, float) for value in flat.values())
    below = flat["miscoupling/miscoupling_null/k4/mean"] - flat["miscoupling/miscoupling/k4/mean"]
    assert flat["coupling/miscoupling_coupling/k4/mean"] == below
    assert "diagnostics/undefined" not in flat
    for end in ("", "_null"):
        assert flat[MEAN_OFFDIAG + end] == flat[f"miscoupling/miscoupling{end}/k2/mean_offdiag"]


@pytest.mark.slow
def test_optional_measures_in_logs():
    """Of inputs of different lengths: what a shorter one lacks does not count."""
    ds = tracker.measure(neox(), padded(7, 3), k=[2, 4], measures="all,tokenwise", pair_tokens=4)
    points, flat = curves(ds, CURVES), scalars(ds)
    assert ds.pair_position.notnull().sum("pair_token").values.tolist() == [4, 3]
    for kind in ("self", "fixed_input", "fixed_output"):
        name = f"{kind}_offdiag_normalized"
        measured = ds[name].sel(k=4)  # l' = l + 1: also t = t'
        null = null_level(ds, name).sel(k=4).where(measured.notnull())
        for values, part in ((measured, ""), (null, "_null")):
            expected = np.mean([np.nanmean(of_prompt) for of_prompt in values])
            found = flat[f"tokens/{kind}/offdiag_normalized{part}/k4"]
            assert found == pytest.approx(expected, rel=1e-6)
    last = ds.entropy.values[:, -1]
    assert flat["trajectory/entropy/q75"] == pytest.approx(np.nanquantile(last, 0.75), rel=1e-6)
    similar = np.nanmean(ds.noise_similarity.sel(noise=0.1).values[:, -1], -1).mean()
    for found in (
        flat["trajectory/noise_similarity/10pct"],
        points.noise_similarity.sel(noise=0.1),
    ):
        assert float(found) == pytest.approx(similar, rel=1e-6)
    assert not [name for name in flat if "." in name]


@pytest.mark.slow
def test_no_jacobian_in_its_own_basis_counts():
    ds = tracker.measure(neox(), tokens(2), k=4, measures="tokenwise", pair_tokens=3, pair_layers=0)
    pairs = [(l, t, u) for l in (1, 2, 3) for t in range(3) for u in range(3) if t != u]
    for kind in ("self", "fixed_input", "fixed_output"):
        name = f"{kind}_miscoupling"
        for values, point in ((ds[name], name), (null_level(ds, name), f"{name}_null")):
            expected = np.mean([values.values[:, 0, l - 1, t, u] for l, t, u in pairs])
            assert curves(ds, CURVES)[point].item() == pytest.approx(expected, rel=1e-6)
            assert reduced(ds)[point].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "others, said, middle",
    [
        ([2, 3, 4, np.nan], "l' = l + 1", (2, 3)),
        ([1, 2, 3, 4], "l' = l", (2, 2)),
        ([np.nan, np.nan, 1, 2], "l' = l − 2", (3, 1)),
        ([2, np.nan, 3, np.nan], "(l, l') = (1, 2), (3, 3)", (1, 2)),  # as could be listed
    ],
)
def test_which_layers_were_compared_across_tokens(others, said, middle):
    coords = {"layer": [1, 2, 3, 4], "pair_layer_other": ("layer", others)}
    ds = xr.Dataset(coords=coords)
    assert (layers_in_words(ds), middle_layers(ds)) == (said, middle)


CLUSTERS = {
    "nothing": ({}, None),
    "labels, one missing": ({"prompt_source": ["a", "", "a"]}, [0, 1, 0]),
    "labels that are numbers, most missing": ({"prompt_source": [3.0, np.nan, np.nan]}, None),
    "one label": ({"prompt_source": ["a"] * 3}, None),
    "objects": ({"prompt_source": np.array([None, "a", "a"], object)}, [0, 1, 1]),
    "different inputs": ({"prompt_digest": [7, 8, 9]}, None),
    "equal inputs": ({"prompt_digest": [7, 8, 7]}, [0, 1, 0]),
    "one text, of which several prompts were made": (
        {"prompt_digest": [7, 8, 9], "prompt_text": ["a"] * 3},
        None,
    ),
    "equal texts of unknown inputs": ({"prompt_text": ["a", "b", "a"]}, [0, 1, 0]),
    "equal inputs of two sources": (
        {"prompt_digest": [7, 7, 8], "prompt_source": ["a", "b", "b"]},
        [0, 0, 0],
    ),
    "equal inputs of one source": (
        {"prompt_digest": [7, 8, 7], "prompt_source": ["a"] * 3},
        [0, 1, 0],
    ),
}


@pytest.mark.parametrize("given, clusters", CLUSTERS.values(), ids=CLUSTERS)
def test_clusters_of_prompts(ds, given, clusters):
    """Prompts without a label, and those of a single source, stand for themselves."""
    known = {"prompt_text": [""] * 3} | given
    coords = {name: ("prompt", values) for name, values in known.items()}
    labelled = ds.drop_vars("prompt_digest").assign_coords(coords)
    for of in (labelled, reduced(labelled)):
        found = sources(of)
        assert (found is None) if clusters is None else found.tolist() == clusters


def test_the_digest_of_a_prompt_is_of_what_the_model_received():
    ids, model = tokens(3, 5), neox()
    ds = tracker.measure(model, ids[[0, 1, 0, 2]], k=2)
    digests = ds.prompt_digest.values
    assert digests[0] == digests[2] and len(set(digests.tolist())) == 3
    assert digests.max() >= 2**32, "of more bits than a seed has"
    again = tracker.measure(model, ids, k=2).prompt_digest.values
    assert again.tolist() == digests[[0, 1, 3]].tolist()


IDS, IMAGES = torch.tensor([[1, 2, 0], [1, 2, 0]]), torch.tensor([[[0.0]], [[1.0]]])
PADDED = torch.tensor([[1, 2, 0], [1, 2, 7]])


@pytest.mark.parametrize(
    "inputs, valid, n, different",
    [
        ([IDS, [IMAGES]], (0, 1, 2), 3, 2),
        ([IDS, torch.arange(5)], (0, 1, 2), 3, 1),
        ([PADDED], (0, 1), 3, 1),
        ([PADDED], (0,), 1, 2),  # one token of three numbers
    ],
)
def test_the_digest_of_a_prompt_is_of_all_of_its_inputs(inputs, valid, n, different):
    """Such as one text with several images, or several samples at one time, without padding."""

    def digests(*arguments):
        return Batch(arguments, {}, [""] * 2).sample_digests((valid,) * 2, n)

    found = digests(*inputs)
    assert len(set(found)) == different and all(0 < one < 2**63 for one in found)
    assert digests(*inputs, torch.arange(5)) != digests(*inputs, torch.arange(1, 6))
    assert digests(4) == [0, 0], "nothing is known of them"


@pytest.mark.slow
def test_steps_measured_before_prompts_had_sources_take_those_of_later_ones(ds, tmp_path):
    stored(tmp_path, {0: ds, 1: ds.assign_coords(prompt_source=("prompt", ["a", "b", "a"]))})
    joined = open_results(tmp_path).prompt_source
    assert joined.dims == ("prompt",) and joined.values.tolist() == ["a", "b", "a"]
