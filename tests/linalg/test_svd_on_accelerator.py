"""Singular triplets on a second device: the CPU's values, and few launches and waits."""

import itertools
from dataclasses import fields
from functools import partial

import pytest
import torch

from tests.support.draws import normal
from tests.support.rounding import rounding
from tests.support.spectra import (
    FALLING,
    SPECTRA,
    assert_right,
    flat,
    planted,
    top_singular_triplets,
)
from tracker.linalg import svd
from tracker.linalg.costs import BASES, GROUP, MATRICES, krylov_is_cheaper, matrices_at_once
from tracker.linalg.krylov import basis_size
from tracker.linalg.orthonormal import Orthonormaliser
from tracker.linalg.svd import Triplets, triplets_of_each

DTYPES = [torch.float32, torch.float64]


def random_matrices(B: int, d: int, falling: bool = False) -> torch.Tensor:
    """Random matrices, as at initialisation, or with singular values that fall by three decades."""
    J = normal(B, d, d) / d**0.5
    return J * torch.logspace(0, -3, d) if falling else J


@pytest.fixture
def cycles(monkeypatch) -> list[int]:
    """Numbers of matrices in the small problems that were copied to the host, one for each full basis."""
    found = []
    pivots = Orthonormaliser.pivots
    monkeypatch.setattr(
        Orthonormaliser, "pivots", lambda self: found.append(len(self.scale)) or pivots(self)
    )
    return found


@pytest.mark.parametrize("method", ["full", "krylov"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_batch_of_all_spectra(pretend, dtype, method):
    """Zero and deficient matrices in a batch, which need tested steps, do not disturb the others."""
    spectra = [torch.tensor(s, dtype=torch.float64) for s in SPECTRA.values()] + [FALLING, flat(96)]
    J = torch.cat([planted(s, seed) for seed, s in enumerate(spectra)]).to(dtype)
    (t,) = triplets_of_each([J.to(pretend.device)], 10, method, 1 << 26)
    parts = {field.name: getattr(t, field.name) for field in fields(t)}
    assert {part.device for part in parts.values()} == {pretend.device}
    assert bool((t.full == (method == "full")).all())
    for b, s in enumerate(spectra):
        assert_right(Triplets(**{name: part[b : b + 1] for name, part in parts.items()}), s, dtype)


@pytest.mark.parametrize("K", [10, 50])
@pytest.mark.parametrize("falling", [False, True])
def test_waits_for_the_device_once_per_full_basis(pretend, cycles, falling, K):
    """Both ways at each: the small problem goes to the host, its solution to the device."""
    J = random_matrices(1, 512, falling).to(pretend.device)
    with pretend.count() as counts:
        t = top_singular_triplets(J, K, "krylov")
    assert bool(t.complete) and not bool(t.full)
    assert counts.to_host <= len(cycles) + 3, (
        "beside the small problems: the choice, the vectors' product, completeness"
    )
    assert counts.syncs - counts.to_device - counts.to_host == 1, "whether all entries are finite"
    assert counts.launches < 800


def test_steps_are_repeated_with_tests_where_pivots_are_small(pretend, monkeypatch):
    repeated = []
    test_from_now = Orthonormaliser.test_from_now
    monkeypatch.setattr(
        Orthonormaliser,
        "test_from_now",
        lambda self, scale: repeated.append(scale.cpu()) or test_from_now(self, scale),
    )
    J = random_matrices(1, 256).to(pretend.device)
    top_singular_triplets(J, 10, "krylov")
    short = 1e-4 * random_matrices(1, 256, falling=True).to(pretend.device)
    svd.by_golub_kahan(short, 10)
    assert not repeated, "rows that are only short are no reason"
    J[..., 4:] = 0
    t = top_singular_triplets(J, 10, "krylov")
    assert repeated and bool(t.complete)
    torch.testing.assert_close(
        t.S.cpu(), torch.linalg.svdvals(J.cpu())[:, :10], atol=rounding(torch.float32), rtol=0
    )


@pytest.mark.parametrize(
    ("d", "K", "spectrum", "at_once", "method"),
    [
        (192, 50, *case, "krylov")
        for case in itertools.product(("flat", "falling", "deficient"), (1, 2, 3))
    ]
    + [
        (384, 10, "falling", 2, "krylov"),
        (384, 50, "falling", 2, "krylov"),
        (768, 10, "falling", 2, "krylov"),
    ]
    + [(192, 40, "flat", 2, "auto"), (192, 40, "deficient", 2, "auto")],
)
def test_batches_stay_within_the_memory_given(
    pretend, monkeypatch, d, K, spectrum, at_once, method
):
    batches = []
    certified = svd.certified
    monkeypatch.setattr(
        svd, "certified", lambda J, *given: batches.append(len(J)) or certified(J, *given)
    )
    J = random_matrices(3, d, falling=spectrum == "falling")
    if spectrum == "deficient":
        J[1, :, K // 2 :] = 0
    Js = [one[None].to(pretend.device) for one in J]
    memory = 4 * at_once * (MATRICES * d**2 + BASES * d * basis_size(d, K))
    pretend.reset_peak()
    before = pretend.live_bytes()
    together = triplets_of_each(Js, K, method, memory)
    assert pretend.peak_bytes() - before <= memory
    assert max(batches) == at_once and sum(batches) == 3 == len(together)


def test_small_matrices_in_full_cost_two_copies(pretend):
    J = random_matrices(6, 64).to(pretend.device)
    with pretend.count() as counts:
        t = top_singular_triplets(J, 5, "full")
    assert counts.to_host == counts.to_device == 1
    largest = float(t.S[:, 0].max())
    expected = torch.linalg.svdvals(J.cpu())[:, :5]
    torch.testing.assert_close(t.S.cpu(), expected, atol=rounding(torch.float32) * largest, rtol=0)
    assert t.U.untyped_storage().nbytes() == t.U.nbytes, "the other columns are not kept"


@pytest.mark.parametrize(
    ("d", "K", "on_cpu", "on_accelerator"),
    [
        (192, 10, False, False),
        (256, 10, False, True),
        (320, 50, False, False),
        (512, 200, False, False),
    ]
    + [(1024, 50, True, True), (5120, 10, True, True)],
)
def test_the_cheaper_method_by_device(pretend, d, K, on_cpu, on_accelerator):
    assert krylov_is_cheaper(d, K, torch.float32, torch.device("cpu")) == on_cpu
    for device in (pretend.device, torch.device("cuda", 0)):
        assert krylov_is_cheaper(d, K, torch.float32, device) == on_accelerator


def test_matrices_at_once_by_device(pretend):
    cpu = torch.device("cpu")
    of_float32 = partial(matrices_at_once, dtype=torch.float32)
    assert matrices_at_once(1024, 10, torch.float32, cpu, 1) == 1
    assert matrices_at_once(1024, 10, torch.float32, cpu, 1 << 40) == GROUP // 1024**2
    assert of_float32(5120, 10, device=pretend.device, memory=1) == 1
    memory = 80 * 2**30 // 4  # a quarter of 80 GB
    assert of_float32(5120, 10, device=pretend.device, memory=memory) >= 36, (
        "all layers of Pythia 12b"
    )
