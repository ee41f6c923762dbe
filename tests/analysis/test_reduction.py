"""What is kept of a unit for pages and summaries, against plain NumPy over the Dataset, where prompts differ in length."""

import itertools

import numpy as np
import pytest
import xarray as xr

import tracker
from tests.support.models import Size, neox, padded
from tests.support.stores import stored
from tests.support.units import assert_same
from tracker.analysis.curves import curves
from tracker.analysis.null_levels import null_level
from tracker.analysis.reduction import (
    PATHS,
    read_miscouplings,
    read_reduced,
    reduced,
)
from tracker.measures.registry import KINDS, MISCOUPLINGS, VARIANTS
from tracker.store import Store, open_results

LENGTHS = (9, 5)
MEASURES = "all,tokenwise"


@pytest.fixture(scope="module")
def ds():
    options = {"k": [2, 12], "tokens": [0, -1], "pair_tokens": 3}
    return tracker.measure(neox(size=Size(depth=4)), padded(*LENGTHS), measures=MEASURES, **options)


@pytest.fixture(scope="module")
def unit(ds):
    return reduced(ds)


def test_couplings(ds, unit):
    apart = ds.layer.values[:, None] != ds.layer_other.values
    for name in VARIANTS:
        values, level = ds[name].astype(float), null_level(ds, name)
        for part, of in (("matrix", values), ("level", level)):
            expected = of.mean(("prompt", "token"))
            xr.testing.assert_allclose(unit[f"{name}_{part}"], expected, rtol=1e-6)
        gain = (level - values).values[..., apart].mean((1, -1))  # (prompt, token, k, ...)
        found = unit[f"{name}_coupling_by_prompt"].sel(pairs="mean_offdiag")
        np.testing.assert_allclose(found.transpose("prompt", "k"), gain, rtol=1e-5, atol=1e-7)


def below_median(values, pooled):
    """Return how many values of a prompt are below the median beyond half of them; NaN of none."""
    middle = np.median(pooled)
    below = (values < middle).sum() + 0.5 * (values == middle).sum() - 0.5 * len(values)
    return below if len(values) else np.nan


def test_what_an_interval_of_a_median_needs(ds):
    values = ds.lss.values.copy()
    values[1, 2] = values[0, 3]  # equal values
    values[0, 0] = np.nan
    one, none = values.copy(), values.copy()
    one[1, 1:] = none[1] = np.nan  # a single value, or none
    for some in (values, one, none):
        found = reduced(ds.assign(lss=ds.lss.copy(data=some)))
        by_prompt = [of[~np.isnan(of)] for of in some]
        pooled = np.concatenate(by_prompt)
        percentiles = np.percentile(pooled, np.arange(101))
        np.testing.assert_allclose(found.lss_percentiles, percentiles, rtol=1e-6)
        prompts = sum(map(any, by_prompt))
        expected = [below_median(of, pooled) * prompts / len(pooled) for of in by_prompt]
        np.testing.assert_allclose(found.lss_below, expected)
    undefined = reduced(ds.assign(lss=ds.lss * np.nan))
    assert undefined.lss_below.isnull().all() and undefined.lss_percentiles.isnull().all()


def test_quartiles_by_depth(ds, unit):
    for name, axes in (("jacobian_gain", (0, 1)), ("entropy", (0, 2)), ("norm", (0, 2))):
        found = unit[f"{name}_by_depth"].sel(statistic=["q25", "median", "q75"])
        expected = np.nanquantile(ds[name].values.astype(float), (0.25, 0.5, 0.75), axis=axes)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_matrices_and_singular_values(ds, unit):
    expected = abs(ds.matrix).mean(("prompt", "token"))
    np.testing.assert_allclose(unit.matrix_absolute, expected, rtol=1e-5)
    expected = ds.singular_value.sel(rank=[1, 2, 5, 10]).astype(float).median(("prompt", "token"))
    np.testing.assert_allclose(unit.singular_value_median, expected, rtol=1e-6)
    for size, kept in ((5, [1, 2, 5]), (12, [1, 2, 5, 10]), (60, [1, 2, 5, 10, 20, 30, 50])):
        some = ds[["singular_value"]].isel(rank=np.arange(size) % 12)
        found = reduced(some.assign_coords(rank=range(1, size + 1)))
        assert found["rank"].values.tolist() == kept
    assert "rank" not in reduced(ds[["norm"]]).dims


def test_token_pairs(ds, unit):
    middle = 1  # of the pairs of blocks (1, 2), (2, 3) and (3, 4), (2, 3) is in the middle
    for kind in KINDS:
        for name in MISCOUPLINGS:
            values = ds[f"{kind}_{name}"].values.astype(float)
            found = unit[f"{kind}_{name}_matrix"].values
            np.testing.assert_allclose(found, values.mean(0), rtol=1e-6)
        A, s = ds[f"{kind}_matrix"].values, ds[f"{kind}_singular_value"].values
        expected = [abs(A[p, middle]) / s[p, middle, :, 0][:, None, None, None] for p in (0, 1)]
        np.testing.assert_allclose(unit[f"{kind}_absolute"], np.mean(expected, axis=0), rtol=1e-5)
    np.testing.assert_array_equal(unit.pair_position, ds.pair_position)
    assert not [name for name in unit if "gain_matrix" in name]


def test_states(ds, unit):
    assert unit.length.values.tolist() == [*LENGTHS]
    np.testing.assert_array_equal(unit.pca_paths, ds.pca.values[0])
    assert unit.path.values.tolist() == ds.position.values.tolist()
    shorter = reduced(ds.isel(prompt=[1, 0]))  # of the first prompt, which has fewer tokens now
    np.testing.assert_array_equal(shorter.pca_paths, ds.pca.values[1][:, : LENGTHS[1]])
    similar = ds.noise_similarity.values.astype(float)
    expected = np.stack([np.nanmean(similar[:, :, at], axis=-1).mean(0) for at in (1, -1)], -1)
    np.testing.assert_allclose(unit.noise_similarity_ends, expected, rtol=1e-6)
    assert unit.end.values.tolist() == [1, ds.sizes["depth"] - 1]
    assert "noise_similarity_ends" not in reduced(ds.isel(depth=[0])[["noise_similarity"]])


def test_paths_of_many_tokens(ds):
    position = np.arange(3 * PATHS)
    pca = np.stack([position, -position], -1)[None, None].astype(float)
    many = {"prompt": [0], "depth": [0], "position": 0 * position}
    some = ds[["pca"]].isel(many).assign_coords(position=position)
    found = reduced(some.assign(pca=(some.pca.dims, pca)))
    chosen = found.path.values
    assert len(chosen) == PATHS and (chosen[0], chosen[-1]) == (0, 3 * PATHS - 1)
    assert set(np.diff(chosen)) <= {3, 4}
    np.testing.assert_array_equal(found.pca_paths.values[0, :, 1], -chosen)


def test_certificates(ds):
    names = "residual value_error derivative_error sliced complete".split()
    values = np.ones((5, 2, 2, 4))
    values[:, 0, 1, 2] = [3, 4, 5, 0, 0]
    values[0, 1, 0, :2] = np.nan  # no Jacobian there
    dims = ("prompt", "token", "layer")
    planted = zip(names, values, strict=True)
    found = reduced(ds.assign({f"diagnostics_{name}": (dims, of) for name, of in planted}))
    assert found.jacobians_count.values.tolist() == [3, 3, 4, 4]
    for name in ("sliced", "complete"):
        assert found[f"{name}_count"].values.tolist() == [3, 3, 3, 4]
    assert [float(found[f"{name}_max"]) for name in names[:3]] == [3, 4, 5]
    assert "jacobians_count" not in reduced(ds.drop_vars("diagnostics_sliced"))


def test_what_is_kept_as_it_is(ds, unit):
    assert {"prompt_text", "diagnostics_undefined"} <= set(unit.variables)
    assert float(reduced(ds.assign(score=0.5)).score) == 0.5 and unit.attrs == ds.attrs


def test_steps_give_the_same_values_as_units(tmp_path):
    units = [tracker.measure(neox(), padded(*LENGTHS), k=[2, 4]) for _ in range(2)]
    store = stored(tmp_path, dict(enumerate(units)))
    for found in (read_reduced(store.path), reduced(open_results(store.path))):
        for step, unit in enumerate(map(reduced, units)):
            at = found.isel(step=step)
            names = [name for name in unit.data_vars if unit[name].dtype.kind == "f"]
            expected = {name: unit[name].transpose(*at[name].dims) for name in names}
            assert_same(at, xr.Dataset(expected), names, 1e-6, 1e-9)


def test_miscouplings_of_a_store_are_read_for_each_token(ds, tmp_path, monkeypatch):
    """Nothing else is read: a grid of trainings has a thousand units."""
    doubled = ds.assign({name: 2 * ds[name] for name in MISCOUPLINGS})
    stored(tmp_path, {0: doubled.assign_attrs(created="another day"), 8: ds})
    names, curve = set(), Store.curve
    monkeypatch.setattr(Store, "curve", lambda *given: names.update(given[2]) or curve(*given))
    read = read_miscouplings(tmp_path)
    assert "miscoupling" in names and not names & {"matrix", "norm", "lss_window"}
    assert read.sizes == {"step": 2, "token": 2, "measure": 5, "k": 2, "pairs": 3}
    # When steps were measured differs between the cells of a grid
    assert read.coords.keys() <= read.sizes.keys()
    first, last = read.miscoupling
    np.testing.assert_allclose(first, 2 * last, rtol=1e-6)
    for token, name in itertools.product(range(2), MISCOUPLINGS):
        points = curves(ds.isel(token=[token]), [name])
        found = read.sel(measure=name, step=8, token=read.token[token])
        for part, end in (("miscoupling", ""), ("null", "_null")):
            np.testing.assert_allclose(found[part], points[f"{name}{end}"], rtol=1e-6)
    with pytest.raises(FileNotFoundError):
        read_miscouplings(tmp_path / "none")
