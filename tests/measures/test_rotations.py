"""Null levels by rotations: against many rotations drawn otherwise, and unrelated blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.draws import seeded
from tests.support.kinds_of_matrices import KINDS, planted
from tracker.measures import coupling, rotations
from tracker.measures.coupling import BY_ROTATIONS, DEFINITIONS

D, L = 12, 3
FORMULAS = {definition.name: definition.formula for definition in DEFINITIONS}


def few_large(d, count, generator):
    """Blocks with a trace and two large singular values."""
    left, right = torch.randn(2, count, d, 2, generator=generator, dtype=torch.float64) / d**0.5
    rest = torch.randn(count, d, d, generator=generator, dtype=torch.float64) / d**0.5
    return -0.3 * torch.eye(d, dtype=torch.float64) + 3 * left @ right.mT + 0.02 * rest


def levels_of(J, ks, signs=1.0):
    """Levels of all pairs of Jacobians (rows, blocks, d, d), by definition: (rows, k, blocks, blocks)."""
    K, d = max(ks), J.shape[-1]
    U, s, Vh = torch.linalg.svd(J)
    U, s, V = U[..., :K] * signs, s[..., :K], Vh[..., :K, :].mT * signs
    F = rotations.frames(d).to(J)
    T = torch.stack([rotations.turned(J[:, l], F) for l in range(J.shape[1])], 1)
    return rotations.mean_levels(T, s, coupling.moments(J, s[..., 0]), U, V, ks)


def forget():
    """Draw frames anew."""
    rotations.frames.cache_clear()
    rotations.drawn.cache_clear()


def values_of(J, K):
    """Mis-couplings of all pairs, by definition: (rows, blocks, blocks)."""
    U, s, Vh = torch.linalg.svd(J)
    A = torch.einsum("rmdi,rlde,rmje->rlmij", U[..., :K], J, Vh[..., :K, :])
    return {name: formula(A, s[..., None, :K]) for name, formula in FORMULAS.items()}


@pytest.mark.parametrize(
    ("kind", "K", "most"),
    [
        ("random", 2, 0.01),
        ("random", 10, 0.001),
        ("random", 30, 0.0003),
        ("few large", 2, 0.016),
        ("few large", 10, 0.012),
        ("few large", 30, 0.008),
    ],
)
def test_what_frames_leave_of_chance(kind, K, most, monkeypatch):
    """Root mean square over pairs, by eq. 14, and half of it in their mean."""
    J = torch.stack([planted(kind, 64, 0.5, i) for i in range(5)]) if kind in KINDS else None
    J = few_large(64, 5, seeded(6)) if J is None else J
    found = levels_of(J[None], (K,))["offdiag_normalized"]
    for name, times in (("COLUMNS", 64), ("ENTRIES", 64)):
        monkeypatch.setattr(rotations, name, times * getattr(rotations, name))
    forget()
    error = (found - levels_of(J[None], (K,))["offdiag_normalized"])[..., ~torch.eye(5).bool()]
    forget()
    assert float(error.square().mean().sqrt()) <= most and abs(float(error.mean())) <= most / 2


PAIRS = [(kind, kind) for kind in (*KINDS, "few large")] + [("antisymmetric", "symmetric")]


@pytest.mark.parametrize(("kind", "other"), PAIRS)
@pytest.mark.parametrize("K", [1, 2, 3, 8, 16])
def test_levels_are_those_of_many_rotations_that_are_drawn_otherwise(kind, other, K, monkeypatch):
    """In float32: expected squares may be rounding errors, of an antisymmetric Jacobian in a symmetric basis or with K = 1."""
    d, draws = 24, 4000
    J = few_large(d, 2, seeded(2))
    if kind in KINDS:
        J = torch.stack([planted(kind, d, 0.7, 2), planted(other, d, 0.7, 3)])
    # Of many rotations, so that few columns are those of several frames
    for name, value in (("COLUMNS", 2000 * K), ("ENTRIES", 2000 * K**2)):
        monkeypatch.setattr(rotations, name, value)
    forget()
    found = levels_of(J[None].float(), (K,))
    forget()
    U, s, Vh = torch.linalg.svd(J)
    A = coupling.simulated(J[0], U[1, :, :K], Vh[1, :K].mT, draws, seeded(3))
    for name in BY_ROTATIONS:
        drawn = FORMULAS[name](A, s[0, :K])
        chance = 4.5 * float(drawn.std()) * (1 / draws + 1 / 2000) ** 0.5
        error = abs(float(drawn.mean() - found[name][0, 0, 0, 1]))
        assert error <= chance + 1e-4 * float(s[0, 0]), name


def test_unrelated_blocks_have_no_coupling():
    """Means over 200 models with a trace and few large values. By the formulas eq. 14 has 0.04 at K = 2 and 0.02 at K = 5."""
    generator, ks, count, blocks = seeded(4), (2, 3, 10), 200, 5
    J = few_large(40, count * blocks, generator).unflatten(0, (count, blocks))
    levels, apart = levels_of(J, ks), ~torch.eye(blocks, dtype=torch.bool)
    for i, k in enumerate(ks):
        for name, values in values_of(J, k).items():
            if name in BY_ROTATIONS:
                by_model = (levels[name][:, i] - values)[:, apart].mean(1)
                assert (
                    abs(float(by_model.mean())) <= 0.003 + 3 * float(by_model.std()) / count**0.5
                ), (name, k)
    by_model = (levels["offdiag_normalized"][:, 0] - values_of(J, 2)["offdiag_normalized"])[
        :, apart
    ].mean(1)
    assert float(by_model.std()) / count**0.5 < 0.006, (
        "so that the bound above finds the 0.04 of the formulas"
    )


@settings(max_examples=15, deadline=None)
@given(
    signs=st.lists(st.sampled_from([-1.0, 1.0]), min_size=4, max_size=4),
    scale=st.floats(1e-25, 1e20),
    order=st.permutations(range(L)),
)
def test_signs_of_vectors_scale_and_order_of_blocks_do_not_matter(signs, scale, order):
    J = torch.stack([planted("with a trace", D, 0.5, i) for i in range(L)])[None]
    plain = levels_of(J, (2, 4))
    changed = levels_of(scale * J[:, order], (2, 4), torch.tensor(signs))
    for name, values in plain.items():
        expected = values[:, :, order][..., order] * (scale if name == "offdiag" else 1.0)
        torch.testing.assert_close(changed[name], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("K", [1, 5, 6, 7])
def test_bases_in_the_columns_of_their_frame(K):
    """Those of V' have its product with U' and its own products; U' is the first ones, unless the frame is a whole rotation."""
    U, _, Vh = torch.linalg.svd(planted("with a trace", D, 0.5, 0)[None, None])
    U, V = U[..., :K], Vh[..., :K, :].mT
    left, right = rotations._coordinates(U, V)
    if 2 * K > D:
        assert left is U and right is V
        return
    torch.testing.assert_close(right[..., :K, :], U.mT @ V)
    torch.testing.assert_close(right.mT @ right, torch.eye(K).to(V)[None, None])
    assert left is None


def test_levels_of_zero_jacobians():
    J = torch.stack([planted("random", D, 0.5, i) for i in range(L)])[None]
    J[:, 1] = 0
    for values in levels_of(J, (4,)).values():
        assert values[0, 0, 1].isnan().all() and values[0, 0, 0, [0, 2]].isfinite().all()


def test_rows_and_frames_in_parts(monkeypatch):
    J = torch.stack(
        [torch.stack([planted("random", D, 0.5, L * r + i) for i in range(L)]) for r in range(4)]
    )
    whole = levels_of(J, (2, 8))
    monkeypatch.setattr(rotations, "AT_ONCE", 1)
    for name, values in levels_of(J, (2, 8)).items():
        torch.testing.assert_close(values, whole[name], rtol=1e-12, atol=0)


def test_frames_are_haar_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    forget()
    F, columns = rotations.frames(16), rotations.drawn(16, 3)[1]
    assert F.shape == (rotations.COLUMNS // 16, 16, 16)
    assert columns.shape == (rotations.ENTRIES // 9, 6)
    assert abs(F.diagonal(dim1=-2, dim2=-1).mean()) < 0.07, "QR alone gives a diagonal of one sign"
    forget()
    assert torch.equal(F, rotations.frames(16)) and torch.equal(columns, rotations.drawn(16, 3)[1])
    assert torch.equal(state, torch.get_rng_state())
    assert rotations.frames(200).shape == (1, 200, rotations.COLUMNS)
