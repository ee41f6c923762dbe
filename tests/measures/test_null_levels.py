"""Null levels: closed forms against rotations drawn at random, and the levels of measured Datasets."""

import pytest
import torch
import xarray as xr

import tracker
from tests.support.draws import normal, seeded
from tests.support.kinds_of_matrices import KINDS, falling, planted
from tests.support.models import Size, build, neox, tokens
from tests.support.refused import refused
from tracker.analysis.null_levels import null_level
from tracker.measures import coupling
from tracker.measures.coupling import DEFINITIONS
from tracker.measures.registry import MISCOUPLINGS

DRAWS = 2000


def of_basis(J, K):
    U, _, Vh = torch.linalg.svd(J)
    U, V = U[:, :K], Vh[:K].T
    return U, V, coupling.overlap((U.T @ V)[None])


def closed_forms(J, other, K):
    """The roots of mean squares, and the values of all definitions over rotations drawn at random."""
    U, V, overlap = of_basis(other, K)
    s = torch.linalg.svdvals(J)[:K]
    found = coupling.moments(J[None], s[:1])
    entries = coupling.Entries(found, overlap, len(J))
    page, release = coupling.root_mean_squares(s[None], entries)
    levels = {
        "miscoupling": page,
        "miscoupling_release": release,
        "offdiag": entries.off_square.sqrt(),
        "offdiag_normalized": (entries.off_square / entries.square).sqrt(),
    }
    levels = {name: float(level) for name, level in levels.items()}
    A = coupling.simulated(J, U, V, DRAWS, seeded(5))
    return levels, {definition.name: definition.formula(A, s) for definition in DEFINITIONS}


@pytest.mark.parametrize("shape", [(1, 2048), (3, 1, 700), (40, 33), (2, 1)])
def test_moments_in_float32_equal_those_in_float64(shape):
    """Of matrices in many tiles, the last one smaller, and in one; one sum of 2048^2 squares would be 1.6e-4 too small."""
    d = shape[-1]
    J = normal(*shape, d, seed=0) / d**0.5
    J = J + 0.2 * J.mT + 0.5 * torch.eye(d)
    found = coupling.moments(J, torch.full(shape[:-1], 2.0))
    J = J.double()
    isotropic = J.diagonal(dim1=-2, dim2=-1).mean(-1)
    rest = J - isotropic[..., None, None] * torch.eye(d)
    expected = {
        "isotropic": isotropic,
        "symmetric": torch.linalg.matrix_norm(rest + rest.mT) / 2,
        "antisymmetric": torch.linalg.matrix_norm(rest - rest.mT) / 2,
    }
    for part, value in expected.items():
        torch.testing.assert_close(getattr(found, part).double(), value, rtol=1e-6, atol=0)


def test_moments_of_tiny_jacobians_keep_their_digits():
    J, scale = falling(12, 0.3, 0)[None], 1e-25
    found = coupling.moments(scale * J.float(), torch.tensor([scale]))
    expected = coupling.moments(J, torch.ones(1))
    for part in ("isotropic", "symmetric", "antisymmetric"):
        assert float(getattr(found, part)) / scale == pytest.approx(
            float(getattr(expected, part)), rel=1e-5
        )
    assert float(found.frobenius(12)) / scale == pytest.approx(float(J.norm()), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("d", "K", "power"), [(48, 1, 0.3), (48, 5, 0.3), (48, 5, 1.5), (24, 16, 0.3), (24, 16, 1.5)]
)
def test_levels_are_those_of_random_rotations(kind, d, K, power):
    levels, drawn = closed_forms(planted(kind, d, power, 0), planted(kind, d, power, 1), K)
    for name, level in levels.items():
        squares = drawn[name] ** 2
        chance = 5 * float(squares.std()) / DRAWS**0.5
        # The release's E|A_kk| is that of a normal variable, and the normalized one a ratio of expectations.
        approximate = {"miscoupling": 0.0, "offdiag": 0.0}.get(name, 0.03 if power < 1 else 0.06)
        assert abs(float(squares.mean()) - level**2) <= chance + approximate * level + 1e-12, name


def test_singular_values_of_all_ranks_are_needed():
    ds = tracker.measure(neox(size=Size(width=48)), tokens(2), k=(2, 5))
    of_trace = "miscoupling_release_trace"
    for ranks in ([0, 1, 2, 3], [1, 2, 3, 4]):
        with refused("needs rank 1 to 5"):
            null_level(ds.isel(rank=ranks), of_trace)
    few = null_level(ds.isel(rank=[0, 1], k=[0]), of_trace)
    xr.testing.assert_equal(few, null_level(ds, of_trace).isel(k=[0]))


def test_what_a_level_is_read_from_is_named_and_names_that_have_none():
    model, inputs = build("gpt_neox")
    ds = tracker.measure(model, inputs, k=3)
    for name in ("miscoupling_release", "miscoupling_release_trace"):
        part = ["singular_value"] * name.endswith("trace")
        chosen = ds[[name, "miscoupling_release_level", *part]]
        xr.testing.assert_equal(null_level(chosen, name), null_level(ds, name))
        needed = ", ".join(["miscoupling_release_level", *part])
        with refused(f"the null level of {name} needs {needed}, which"):
            null_level(ds[[name]], name)
    with refused("needs miscoupling_level, which this part"):
        null_level(ds[["miscoupling", "singular_value", "isotropic"]], "miscoupling")
    for name in ("lss", "miscoupling_vju", "nothing"):
        with refused(f"'{name}' has no null level that can be computed here; choose from miscoup"):
            null_level(ds, name)
    some = {"layer": [0, 1], "layer_other": [1, 2]}
    for name in MISCOUPLINGS:
        xr.testing.assert_equal(null_level(ds.isel(some), name), null_level(ds, name).isel(some))
