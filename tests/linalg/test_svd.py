"""Singular triplets and their certificate, which must tell the truth about planted faults."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dtypes import EACH_DTYPE
from tests.support.rounding import rounding
from tests.support.spectra import (
    FALLING,
    FLAT,
    SPECTRA,
    assert_right,
    assert_same_span,
    planted,
    top_singular_triplets,
)
from tracker.linalg import costs, krylov, svd
from tracker.linalg.costs import eigenvectors_are_cheaper
from tracker.linalg.svd import PANEL, is_complete, residual

RESIDUAL = dict(svd.TOLERANCE)  # promised; a test changes the original


def assert_same_vectors(t: svd.Triplets, J: torch.Tensor):
    """Each pair (u_k, v_k) against LAPACK's, joint sign aside: it turns by its error over the gap to its neighbours (Wedin)."""
    K = t.S.shape[-1]
    U, S, Vh = torch.linalg.svd(J)
    sign = (t.U * U[..., :K]).sum(-2, keepdim=True).sign()
    falls = torch.nn.functional.pad(-S.diff() / S[..., :1], (1, 1), value=torch.inf)
    gap = torch.minimum(falls[..., :-1], falls[..., 1:])[..., :K]
    assert (t.residual < RESIDUAL[J.dtype]).all()
    error = rounding(J.dtype) + t.residual[..., None]
    assert ((t.S - S[..., :K]).abs() / S[..., :1] <= error).all()
    assert (torch.linalg.vector_norm(t.U * sign - U[..., :K], dim=-2) <= error / gap).all()
    assert (torch.linalg.vector_norm(t.V * sign - Vh[..., :K, :].mT, dim=-2) <= error / gap).all()


@pytest.mark.parametrize("method", ["full", "krylov"])
@pytest.mark.parametrize("s", [FALLING, FLAT], ids=["falling", "flat"])
@pytest.mark.parametrize("K", [1, 10, 40])
def test_values_and_vectors(method, s, K):
    J = planted(s)
    t = top_singular_triplets(J, K, method)
    assert_same_vectors(t, J)
    torch.testing.assert_close(t.S[0], s[:K], atol=2 * rounding(torch.float64), rtol=0)
    torch.testing.assert_close(t.gap[0], (s[:K] - s[1 : K + 1]) / s[0], atol=1e-12, rtol=0)
    assert bool(t.complete)
    assert bool(t.full) == (method == "full")


@pytest.mark.parametrize("method", ["full", "krylov"])
@EACH_DTYPE
@pytest.mark.parametrize("name", SPECTRA)
def test_clustered_deficient_zero_and_tiny(method, dtype, name):
    s = torch.tensor(SPECTRA[name], dtype=torch.float64)
    assert_right(top_singular_triplets(planted(s).to(dtype), 10, method), s, dtype)


def test_the_gap_below_the_last_singular_value_is_that_to_zero():
    t = top_singular_triplets(planted(FALLING[:4]), 4)
    torch.testing.assert_close(t.gap[0, -1], FALLING[3] / FALLING[0])


@pytest.mark.parametrize("d, K", [(3, 3), (15, 4), (16, 16), (47, 9), (96, 60)])
def test_without_room_for_krylov_bases_the_full_decomposition_serves(d, K):
    J = planted(FALLING[:d])
    t = top_singular_triplets(J, K, "krylov")
    assert bool(t.full)
    assert_same_vectors(t, J)


# The certificate


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    d=st.integers(4, 40),
    K=st.integers(1, 12),
    single=st.booleans(),
    data=st.data(),
)
def test_completeness_says_true_of_whichever_triplets_are_missing(seed, d, K, single, data):
    """Residuals of the triplets that are there look perfect; only the completeness test sees what is not."""
    dtype = torch.float32 if single else torch.float64
    s = torch.linspace(1, 0.2, d, dtype=torch.float64)
    kept = sorted(data.draw(st.sets(st.integers(0, d - 1), min_size=1, max_size=min(K, d))))
    J = planted(s, seed)
    U, S, Vh = torch.linalg.svd(J)
    U, S, V = U[..., kept].to(dtype), S[..., kept].to(dtype), Vh[..., kept, :].mT.to(dtype)
    J = J.to(dtype)
    assert float(residual(J, U, S, V)) < rounding(
        dtype, amplified=1 / float(s[kept[0]])
    )  # relative to the first one kept
    assert bool(is_complete(J, U, S, V)) == (kept == list(range(len(kept))))


@pytest.mark.parametrize("missed", [0, 9, None])
def test_completeness_above_one_panel(missed):
    """Wider than the panels in which the lower half of the product is computed."""
    J = torch.randn(1, PANEL + 60, PANEL + 60)
    U, S, Vh = torch.linalg.svd(J)
    kept = [i for i in range(11) if i != missed]
    assert bool(is_complete(J, U[..., kept], S[..., kept], Vh[..., kept, :].mT)) == (missed is None)


@pytest.fixture(params=[0, 4])
def blind(request, monkeypatch):
    """Iterations that converge to all triplets but one."""

    def without(missed, S, *bases):
        kept = [k for k in range(bases[0].shape[-1]) if k != missed]
        # Of spectra flatter than FLAT nothing is overlooked
        seen = (S[:, 4] > 0.95 * S[:, 0])[:, None, None]
        bases = [torch.where(seen, basis[..., :-1], basis[..., kept]) for basis in bases]
        return torch.where(seen[..., 0], S[..., : len(kept)], S[..., kept]), *bases

    def golub_kahan(apply, apply_transpose, start, K, tolerance):
        U, S, V = krylov.block_golub_kahan(apply, apply_transpose, start, K + 1, tolerance)
        S, U, V = without(request.param, S, U, V)
        return U, S, V

    def lanczos(apply, start, K, tolerance):
        U, S = krylov.block_lanczos(apply, start, K + 1, tolerance)
        S, U = without(request.param, S, U)
        return U, S

    monkeypatch.setattr(svd, "block_golub_kahan", golub_kahan)
    monkeypatch.setattr(svd, "block_lanczos", lanczos)


@EACH_DTYPE
def test_a_triplet_that_the_iteration_misses_is_found_out_and_found(blind, dtype):
    J = planted(FLAT).to(dtype)
    for iteration in (svd.by_golub_kahan, svd.by_squares):
        missing = iteration(J, 10)
        assert float(missing.residual) < svd.TOLERANCE[dtype], "residuals do not show it"
        assert not bool(missing.complete)
    t = top_singular_triplets(J, 10, "krylov")
    assert bool(t.full) and bool(t.complete)
    torch.testing.assert_close(t.S[0].double(), FLAT[:10], atol=rounding(dtype), rtol=0)


def test_only_what_missed_is_done_again(blind):
    flatter = FLAT**0.3
    J = torch.cat([3 * planted(flatter), planted(FLAT, 7), 2 * planted(flatter, 9)])
    t = top_singular_triplets(J, 10, "krylov")
    assert t.full.tolist() == [False, True, False]
    assert t.complete.all()
    assert_same_vectors(t, J)


def assert_values(t: svd.Triplets, J: torch.Tensor):
    """Ten singular values, relative to the largest one of each matrix."""
    expected = torch.linalg.svdvals(J.double())
    largest = expected[:, :1]
    torch.testing.assert_close(
        t.S.double() / largest, expected[:, :10] / largest, atol=rounding(J.dtype), rtol=0
    )


@EACH_DTYPE
@pytest.mark.parametrize(
    "fall, squared, iterated",
    [(0.5, [3], []), (0.05, [1], [2]), (1e-4, [1], [2])],
)
def test_squares_serve_where_singular_values_certainly_do_not_fall_far(
    fall, squared, iterated, dtype, monkeypatch
):
    """Of three matrices, two may fall too far; squares are not tried in vain where that is certain."""
    calls = {"block_lanczos": [], "block_golub_kahan": []}
    for name, of in calls.items():
        iterate = getattr(krylov, name)

        def noted(*given, of=of, iterate=iterate):
            of.append(len(given[-3]))
            return iterate(*given)

        monkeypatch.setattr(svd, name, noted)
    s = torch.cat([torch.linspace(1, fall, 10, dtype=torch.float64), 0.8 * fall * FLAT[10:]])
    J = torch.cat([1e-20 * planted(s), planted(FLAT, 4), 1e10 * planted(s, 8)]).to(dtype)
    t = top_singular_triplets(J, 10, "krylov")
    assert [*calls.values()] == [squared, iterated]
    assert bool(t.complete.all()) and not bool(t.full.any())
    assert float(t.residual.max()) < svd.TOLERANCE[dtype]
    assert_values(t, J)


@EACH_DTYPE
def test_squares_of_several_wider_than_a_panel(dtype):
    J = torch.randn(2, 2 * PANEL + 60, 2 * PANEL + 60, dtype=dtype)
    before = J.clone()
    t = svd.by_squares(J, 10)
    assert torch.equal(J, before), "the Jacobians are still needed"
    assert bool(t.complete.all()) and float(t.residual.max()) < svd.TOLERANCE[dtype]
    assert_values(t, J)


def test_entries_near_the_largest_number():
    J = planted(FLAT).float()
    huge, plain = (top_singular_triplets(scale * J, 10, "krylov") for scale in (2.0**126, 1.0))
    assert (
        bool(huge.complete)
        and torch.equal(huge.S, 2.0**126 * plain.S)
        and torch.equal(huge.U, plain.U)
    )


def test_a_residual_out_of_reach_falls_back(monkeypatch):
    monkeypatch.setitem(svd.TOLERANCE, torch.float64, 1e-18)
    J = planted(FLAT)
    t = top_singular_triplets(J, 10, "krylov")
    assert bool(t.full) and bool(t.complete)
    assert_same_vectors(t, J)
    assert not bool(svd.by_golub_kahan(J, 10).complete)


# Many at once, and the choice


def test_groups_and_cores_change_nothing(monkeypatch):
    J = torch.randn(9, 24, 24, dtype=torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = [top_singular_triplets(one[None], 5) for one in J]
        together = top_singular_triplets(J, 5)
        monkeypatch.setattr(costs, "GROUP", 4 * 24 * 24)
        grouped = top_singular_triplets(J, 5)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    for t in (together, grouped):
        torch.testing.assert_close(t.U, torch.cat([one.U for one in expected]))
        torch.testing.assert_close(t.S, torch.cat([one.S for one in expected]))


@pytest.mark.parametrize(
    "d, K, cheaper",
    [
        (64, 10, False),
        (192, 10, True),
        (192, 50, False),
        (384, 10, True),
        (512, 10, False),
        (640, 50, True),
        (1024, 50, False),
    ],
)
def test_a_few_eigenvectors_are_found_where_that_is_cheaper(d, K, cheaper):
    assert eigenvectors_are_cheaper(d, K, torch.float32, torch.device("cpu")) == cheaper


def test_auto_takes_the_cheapest(monkeypatch):
    taken = []
    for name in ("by_eigenvectors", "by_squares", "by_golub_kahan", "in_full"):
        spied = getattr(svd, name)
        monkeypatch.setattr(
            svd, name, lambda *given, name=name, spied=spied: taken.append(name) or spied(*given)
        )
    top_singular_triplets(planted(FALLING), 5)
    top_singular_triplets(planted(FLAT), 5)
    monkeypatch.setattr(svd, "eigenvectors_are_cheaper", lambda *_: False)
    monkeypatch.setattr(svd, "krylov_is_cheaper", lambda *_: True)
    top_singular_triplets(planted(FLAT), 5)
    assert taken == ["in_full", "by_eigenvectors", "by_squares"]


@pytest.mark.parametrize("power", [0.5, 1, 2])
@EACH_DTYPE
@pytest.mark.parametrize("K", [1, 20, 40])
def test_eigenvectors_of_steep_spectra(K, dtype, power):
    """s_K / s_1 down to 1/1600, where squares lose digits: what they do not find is decomposed in full."""
    s = torch.arange(1, 161, dtype=torch.float64) ** -power
    J = planted(s)
    t = top_singular_triplets(J.to(dtype), K)
    assert bool(t.complete) and float(t.residual) <= svd.TOLERANCE[dtype]
    error = rounding(dtype) + float(t.residual)
    torch.testing.assert_close(t.S[0].double(), s[:K], atol=error, rtol=0)
    gap = float(s[K - 1] - s[K])  # 3e-5 of s_1 at the steepest
    assert_same_span(torch.linalg.svd(J)[0][..., :K], t.U.double(), error / gap)


# Block Golub-Kahan


@EACH_DTYPE
def test_the_iteration_takes_about_as_many_columns_as_expected(dtype, monkeypatch):
    J = torch.cat([planted(FLAT), planted(FLAT, 4)]).to(dtype)
    columns = []

    def apply(V):
        columns.append(V.shape[-1])
        return J @ V

    monkeypatch.setattr(svd, "products_of", lambda J: (apply, lambda U: J.mT @ U))
    t = svd.by_golub_kahan(J, 10)
    assert_same_vectors(t, J)
    assert t.complete.all() and not t.full.any()
    assert 0 < sum(columns) < 2 * krylov.expected_columns(160, 10, dtype)


def test_products_that_are_not_each_other_s_transpose_have_no_certificate(monkeypatch):
    monkeypatch.setattr(svd, "products_of", lambda J: (lambda V: J @ V, lambda U: J @ U))
    assert not bool(svd.by_golub_kahan(planted(FLAT), 10).complete)


# What it does to the rest


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite_is_refused(value):
    J = torch.zeros(1, 64, 64)
    J[0, 1, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        top_singular_triplets(J, 2)


def test_the_same_every_time_and_the_random_state_is_left_alone():
    J = torch.cat([planted(FLAT), torch.zeros(1, 160, 160)])  # whose directions are drawn
    first, state = top_singular_triplets(J, 10, "krylov"), torch.get_rng_state()
    torch.manual_seed(5)
    again = top_singular_triplets(J, 10, "krylov")
    assert torch.equal(first.U, again.U) and torch.equal(first.V, again.V)
    torch.set_rng_state(state)
    top_singular_triplets(J, 10, "krylov")
    assert torch.equal(torch.get_rng_state(), state)


def test_products_are_never_in_reduced_precision(monkeypatch):
    J = planted(FLAT).float()
    seen, products = set(), svd.products_of

    def watched(M):
        apply, apply_transpose = products(M)

        def noted(V):
            seen.add(torch.get_float32_matmul_precision())
            return apply(V)

        return noted, apply_transpose

    monkeypatch.setattr(svd, "products_of", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        top_singular_triplets(J, 10, "krylov")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"highest"}


def test_singular_values_that_rounding_explains_do_not_determine_their_vectors():
    """Rounding leaves d eps s_1, whatever the number of matrices."""
    t = top_singular_triplets(torch.cat([planted(FLAT)] * 2), 3)
    edge = 160 * torch.finfo(torch.float64).eps
    S = torch.tensor([[1.0, 2 * edge, edge / 2], [4.0, 8 * edge, 2 * edge]], dtype=torch.float64)
    assert replace(t, S=S).determined.tolist() == [[True, True, False]] * 2
