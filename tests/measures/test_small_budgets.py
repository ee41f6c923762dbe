"""A memory budget that does not hold the Jacobians of all blocks: they wait in the host's memory or in a file."""

import numpy as np
import pytest
import torch

import tracker
from tests.support import processes
from tests.support.models import Size, build
from tests.support.refused import refused
from tracker.jacobians.kept import JacobianFile
from tracker.measures import layers, plan

WIDTH, DEPTH, SAMPLES = 32, 3, 2
CALLS = DEPTH + 1  # the blocks, and the last one with the final norm
ONE = WIDTH**2 * 8  # bytes of one block's Jacobian at one row, in float64
OPTIONS = {"k": (3, 6), "tokens": "last", "svd": "full", "dtype": "float64", "witness": "off"}
OF_ALL = {
    "measures": ("coupling", "vju", "products", "normality", "depth_use"),
    "keep": "jacobian",
}


pytestmark = pytest.mark.usefixtures("directory")


@pytest.fixture
def in_files(monkeypatch, directory) -> list[torch.Tensor]:
    """The Jacobians that were written to a file, which never has a name."""
    kept = []
    keep = JacobianFile.keep

    def noted(self, J):
        jacobian = keep(self, J)
        kept.append(J)
        assert not any(directory.iterdir())
        return jacobian

    monkeypatch.setattr(JacobianFile, "keep", noted)
    return kept


def model_on(device):
    model, given = build("gpt_neox", Size(width=WIDTH, depth=DEPTH))
    return model.double().to(device), given


def assert_equal(found, expected, atol=1e-10):
    assert set(found) == set(expected)
    for name in expected.data_vars:
        if expected[name].dtype.kind == "f":
            # Differences of values divide their rounding by the step.
            allowed = max(atol, 1e-8) if "independent_error" in name else atol
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-8, atol=allowed, err_msg=name
            )


BETWEEN_TOKENS = {"measures": "tokenwise", "pair_tokens": 3, "pair_layers": 0}


@pytest.mark.parametrize(
    ("measured", "at_once", "waits"),
    [
        (OF_ALL, 1, True),
        (OF_ALL, CALLS - 1, True),
        (OF_ALL, CALLS, False),
        (BETWEEN_TOKENS, 2, True),
    ],
)
def test_jacobians_that_do_not_fit_wait_in_a_file_and_are_formed_once(
    formed, in_files, measured, at_once, waits
):
    model, given = model_on("cpu")
    roomy = tracker.measure(model, given, **OPTIONS, **measured)
    assert not in_files
    each = sorted(formed.each())
    formed.clear()
    tight = tracker.measure(model, given, **OPTIONS, **measured, memory_budget=2 * at_once * ONE)
    assert sorted(formed.each()) == each and len(set(each)) == len(each)
    assert bool(in_files) == waits
    assert measured is BETWEEN_TOKENS or sum(map(len, in_files)) == waits * len(each)
    assert_equal(tight, roomy)


def test_a_file_keeps_every_tensor(directory):
    file = JacobianFile()
    given = [
        torch.randn(2, 5, 5),
        torch.randn(1, 5, 5, dtype=torch.float64),
        torch.randn(5, 3, 5).transpose(0, 1),
    ]
    kept = [file.keep(J) for J in given]
    for J, jacobian in [*zip(given, kept, strict=True)][::-1]:
        for _ in range(2):
            assert torch.equal(jacobian(), J) and jacobian().dtype == J.dtype
    assert not any(directory.iterdir())


def test_a_full_disk(directory):
    file = JacobianFile()
    said = f"{directory} has no space for another 0.004 MB"
    with processes.files_of_at_most(1000), refused(said):
        file.keep(torch.randn(1, 1000, 1))


@pytest.mark.parametrize(
    ("at_once", "host", "in_file"),
    [(1, 1 << 30, False), (2, 1 << 30, False), (1, CALLS * ONE - 1, True)],
)
def test_beside_an_accelerator_jacobians_wait_on_the_host_or_without_memory_there_in_a_file(
    pretend, formed, in_files, monkeypatch, at_once, host, in_file
):
    model, given = model_on(pretend.device)
    held = tracker.measure(model, given, **OPTIONS, **OF_ALL)
    kept = []
    on_host = layers.on_host
    monkeypatch.setattr(layers, "on_host", lambda J: kept.append(J) or on_host(J))
    monkeypatch.setattr(plan, "host_memory", lambda: host)
    formed.clear()
    again = tracker.measure(model, given, **OPTIONS, **OF_ALL, memory_budget=2 * at_once * ONE)
    assert len(formed.each()) == len(set(formed.each())) == CALLS * SAMPLES
    waiting = (in_files, kept) if in_file else (kept, in_files)
    assert [sum(map(len, of_one)) for of_one in waiting] == [CALLS * SAMPLES, 0]
    assert_equal(again, held)


@pytest.mark.parametrize("where", ["host", "file"])
def test_what_waits_takes_no_memory_of_the_device_and_comes_back(pretend, where):
    keep = layers.on_host if where == "host" else JacobianFile().keep
    J = torch.randn(2, WIDTH, WIDTH)
    there = J.to(pretend.device)
    before = pretend.live_bytes()
    jacobian = keep(there)
    del there
    assert pretend.live_bytes() == before - J.nbytes
    back = jacobian()
    assert back.device == pretend.device and torch.equal(back.cpu(), J)


@pytest.mark.slow
def test_the_matrices_of_all_pairs_of_blocks_count_in_the_budget(pretend):
    """In a narrow model with many rows they are larger than the Jacobians."""
    model, _ = build("gpt_neox", Size(width=16, depth=8))
    model, given = model.to(pretend.device), torch.randint(0, 50, (1, 12))
    budget = 4_000_000
    pretend.reset_peak()
    before = pretend.live_bytes()
    options = OPTIONS | {"k": 16, "tokens": "all", "dtype": "float32", "measures": "coupling"}
    tracker.measure(model, given, **options, memory_budget=budget)
    assert pretend.peak_bytes() - before <= budget
