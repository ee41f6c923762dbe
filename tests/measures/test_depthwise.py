"""Mis-couplings of pairs of blocks: by iteration against full decomposition, with and without the final norm."""

import numpy as np
import pytest
import torch

import tracker
from tests.models import Size, build, tokens
from tracker.analysis.null_levels import null_level
from tracker.linalg import svd
from tracker.measures import depthwise
from tracker.measures.registry import MISCOUPLINGS

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = (*MISCOUPLINGS, "singular_value", "lss")


def both(name, dtype, prompts=None, **options):
    """Return the measurements by full decomposition and by iteration."""
    model, given = build(name, Size(width=192))
    inputs = {"inputs": given if prompts is None else prompts, "k": (3, 6), "dtype": dtype, **options}
    return tracker.measure(model, **inputs, svd="full"), tracker.measure(model, **inputs, svd="krylov")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [(name, torch.float64, 1e-7) for name in ("gpt_neox", "timm vit", "bloom")] + [("gpt_neox", torch.float32, 2e-3)],
)
def test_iteration_equals_full_decomposition(name, dtype, tolerance):
    full, iterated = both(name, dtype)
    assert full.diagnostics_full_svd.all() and not iterated.diagnostics_full_svd.any()
    assert full.diagnostics_complete.all() and iterated.diagnostics_complete.all()
    assert float(iterated.diagnostics_residual.max()) <= svd.TOLERANCE[dtype]
    for variable in EXACT:
        np.testing.assert_allclose(iterated[variable], full[variable], atol=tolerance, err_msg=variable)
    for variable in MISCOUPLINGS:
        levels = null_level(iterated, variable), null_level(full, variable)
        np.testing.assert_allclose(*levels, rtol=tolerance, err_msg=variable)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "svd_by"), [("gpt_neox", "full"), ("gemma2, soft cap", "krylov"), ("bloom", "krylov")]
)
def test_both_conventions_of_the_final_norm(name, svd_by):
    """Variables without a suffix are of the blocks alone; those that end in `_normed` differ in the last block."""
    model, given = build(name, Size(width=64))
    options = {"k": (3, 6), "dtype": torch.float64, "svd": svd_by, "tokens": [1, -1]}
    extras = ["coupling", "vju", "matrices"]
    included = tracker.measure(model, given, **options, measures=extras, final_norm="include")
    excluded = tracker.measure(model, given, **options, measures=extras, final_norm="exclude")
    certificate = ("singular_gap", "full_svd", "complete", "sliced", "value_error", "derivative_error")
    certificate = [f"diagnostics_{name}" for name in certificate]
    for variable in (*MISCOUPLINGS, "singular_value", *certificate):
        alone, normed = included[variable], included[f"{variable}_normed"]
        assert normed.dims == alone.dims
        np.testing.assert_allclose(alone, excluded[variable], rtol=0, atol=1e-10, err_msg=variable)
        if variable in MISCOUPLINGS:
            level = null_level(included, variable)
            np.testing.assert_allclose(level, null_level(excluded, variable), rtol=1e-10, err_msg=variable)
            np.testing.assert_array_equal(normed[..., :-1, :-1], alone[..., :-1, :-1])
            assert float(abs(normed - alone)[..., -1, :-1].min()) > 1e-4
            assert float(abs(normed - alone)[..., :-1, -1].max()) > 1e-4
            assert f"{variable}_normed" not in excluded
            assert int(included.diagnostics_undefined.sel(quantity=f"{variable}_normed")) == 0
    for shared in ("miscoupling_vju", "matrix"):
        assert included[shared].sizes["layer"] == included[shared].sizes["layer_other"] == included.sizes["layer"] == 3


@pytest.mark.slow
def test_both_conventions_where_jacobians_do_not_fit_together():
    model, given = build("gpt_neox", Size(width=32))
    options = {"k": (3, 6), "dtype": torch.float64, "tokens": [0, -1], "svd": "full"}
    excluded = tracker.measure(model, given, **options, final_norm="exclude")
    for at_once in (1, 3):  # of the three blocks' Jacobians and the one more
        budget = 2 * at_once * 32**2 * 8
        included = tracker.measure(model, given, **options, final_norm="include", memory_budget=budget)
        np.testing.assert_allclose(included.offdiag_normalized, excluded.offdiag_normalized, atol=1e-10)


def test_one_jacobian_more_for_both_conventions(monkeypatch):
    """Both conventions take L + 1 Jacobians, one more than a single convention."""
    model, given = build("gpt_neox")
    asked = []
    jacobians = depthwise.Jacobians.__call__

    def counted(self, selections):
        asked.append((selections[0][0].layer, selections[0][0].final_norm is not None))
        return jacobians(self, selections)

    monkeypatch.setattr(depthwise.Jacobians, "__call__", counted)
    tracker.measure(model, given, k=3)
    assert asked == [(1, False), (2, False), (3, False), (3, True)]
    asked.clear()
    tracker.measure(model, given, k=3, final_norm="exclude")
    assert asked == [(l, False) for l in (1, 2, 3)]


@pytest.mark.slow
def test_what_does_not_converge_is_decomposed_in_full(monkeypatch):
    monkeypatch.setitem(svd.TOLERANCE, torch.float64, 0.0)
    full, iterated = both("gpt_neox", torch.float64)
    assert iterated.diagnostics_full_svd.all()
    np.testing.assert_allclose(iterated.miscoupling, full.miscoupling, atol=1e-9)


@pytest.mark.slow
def test_rows_of_several_samples_a_few_at_a_time():
    full, iterated = both("gpt_neox", torch.float64, tokens(5), tokens=[0, -1], memory_budget=1 << 22)
    np.testing.assert_allclose(iterated.miscoupling, full.miscoupling, atol=1e-7)
