"""Every declared variable against its formula, by brute force in float64.

A new variable needs an entry of `formulas.FORMULAS`, or one of `WITHOUT_FORMULA` that names the test that checks it.
"""

import numpy as np
import pytest
import xarray as xr

from tests.support.formulas import (
    ANY,
    FORMULAS,
    NOISE,
    NULL_LEVELS,
    WITHOUT_SIGN,
    evaluate,
    formula_name,
)
from tests.support.samples import SILENT, VARIANTS, measured
from tracker.analysis.null_levels import null_level
from tracker.measures import tokenwise
from tracker.measures.registry import BY_NAME, KINDS, MEASURES
from tracker.measures.settings import CHOICE_NAMES

pytestmark = pytest.mark.filterwarnings("ignore")
# Rounding errors alone; tests/measures/test_certificates.py compares planted ones
WITHOUT_FORMULA = {
    f"diagnostics_{start}{name}{end}"
    for name in ("residual", "value_error", "derivative_error", "independent_error")
    for start, end in VARIANTS
} & BY_NAME.keys()
OPTIONS = tuple(dict.fromkeys(measure.option for measure in MEASURES))
MODELS = ("gpt_neox", "timm vit", "bert", SILENT)


def assert_equal(found, expected, name):
    if found.dtype == object:
        np.testing.assert_array_equal(found, expected, name)
        return
    expected = np.array(expected, float)
    assert found.shape == expected.shape, name
    size = np.abs if name.endswith(WITHOUT_SIGN) else lambda values: values
    defined = expected[np.isfinite(expected)]
    atol = 1e-8 * max(1, np.abs(defined).max(initial=0))
    np.testing.assert_allclose(
        size(np.where(expected == ANY, 0, found)), size(np.where(expected == ANY, 0, expected)), rtol=0, atol=atol,
        err_msg=name,
    )  # fmt: skip


def test_each_measured_variable_is_declared():
    ds, _ = measured("gpt_neox")
    assert set(ds.data_vars) == {*BY_NAME, "diagnostics_undefined"}


def test_residuals_and_counts_where_a_block_adds_nothing():
    ds, _ = measured(SILENT)
    undefined = ds.diagnostics_residual.isnull()
    assert undefined.all(("prompt", "token")).values.tolist() == [False, True, False]
    assert int(undefined.sum()) == undefined.size / 3
    alone, _ = measured(SILENT, measures=("coupling", "depth_use"))
    counts = [one.diagnostics_undefined.sel(quantity="update_cosine") for one in (ds, alone)]
    assert counts[0] == counts[1] == alone.update_cosine.isnull().sum()


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_variables_equal_their_formulas(model, option):
    """Also where they are undefined, and how many undefined values are counted."""
    ds, samples = measured(model)
    for measure in compared(model):
        if measure.option == option:
            assert_of_formula(ds, samples, measure)


def compared(model):
    """Return the variables of a measurement that have a formula."""
    ds, _ = measured(model)
    return [
        measure
        for measure in MEASURES
        if measure.name in ds and measure.name not in WITHOUT_FORMULA
    ]


def test_all_declared_variables_are_compared():
    assert {name for name in BY_NAME if formula_name(name) not in FORMULAS} == WITHOUT_FORMULA
    names = {measure.name for measure in compared("gpt_neox")}
    assert names == BY_NAME.keys() - WITHOUT_FORMULA and len(BY_NAME) == len(MEASURES)
    assert {measure.option for measure in MEASURES} == set(OPTIONS) == {"", "keep", *CHOICE_NAMES}
    ds, _ = measured("gpt_neox")
    assert ds["noise"].values.tolist() == list(NOISE)
    assert set(ds["quantity"].values) == {measure.name for measure in MEASURES if measure.counted}


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in WITHOUT_FORMULA])
def test_a_wrong_value_of_any_variable_is_found(name):
    """Half as much again, or another word."""
    ds, samples = measured("gpt_neox")
    wrong = ds[name].copy(
        data=ds[name].values + "!" if ds[name].dtype == object else 1.5 * ds[name].values
    )
    with pytest.raises(AssertionError, match=name):
        assert_of_formula(ds.assign({name: wrong}), samples, BY_NAME[name])


@pytest.mark.parametrize(
    ("pair_layers", "bases"),
    [
        (0, {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}),
        (np.int64(-2), {3: 1, 4: 2, 5: 3}),
    ],
)
def test_tokens_of_blocks_at_a_distance(pair_layers, bases):
    choices = ("coupling", "tokenwise", "matrices")
    ds, samples = measured("gpt_neox", measures=choices, pair_layers=pair_layers)
    assert dict(zip(ds.layer.values, ds.pair_layer_other.values, strict=True)) == {
        l: pytest.approx(bases.get(l, np.nan), nan_ok=True) for l in range(1, 6)
    }
    for measure in tokenwise.DECLARED:
        if measure.name not in WITHOUT_FORMULA:
            assert_of_formula(ds, samples, measure)


def assert_of_formula(ds, samples, measure):
    name = measure.name
    assert ds[name].dims == ("prompt", *measure.dims)
    with np.errstate(all="ignore"):
        expected = [evaluate(sample, measure, FORMULAS) for sample in samples]
        levels = (
            [evaluate(sample, measure, NULL_LEVELS) for sample in samples] if measure.null else []
        )
    for found, of_sample in zip(ds[name].values, expected, strict=True):
        assert_equal(found, of_sample, name)
    for found, of_sample in zip(null_level(ds, name).values if levels else (), levels, strict=True):
        assert_equal(found, of_sample, f"null level of {name}")
    if measure.counted:
        undefined = xr.zeros_like(ds[name], dtype=bool) | np.isnan(expected)
        # Blocks that have a basis
        counted = ds.pair_layer_other.notnull() if measure.variant in KINDS else True
        assert ds.diagnostics_undefined.sel(quantity=name) == (undefined & counted).sum(), name
