"""A memory budget that does not hold the Jacobians of all blocks: they wait in the host's memory or in a file."""

import tempfile

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


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Where temporary files are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


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


@pytest.mark.parametrize("at_once", [1, CALLS - 1, CALLS])
def test_jacobians_that_do_not_fit_wait_in_a_file_and_are_formed_once(formed, in_files, at_once):
    model, given = model_on("cpu")
    roomy = tracker.measure(model, given, **OPTIONS, **OF_ALL)
    assert not in_files
    each = sorted(formed.each())
    formed.clear()
    tight = tracker.measure(model, given, **OPTIONS, **OF_ALL, memory_budget=2 * at_once * ONE)
    assert sorted(formed.each()) == each and len(set(each)) == CALLS * SAMPLES
    assert sum(map(len, in_files)) == (0 if at_once == CALLS else CALLS * SAMPLES)
    assert_equal(tight, roomy)


def test_jacobians_between_tokens_that_do_not_fit_wait_in_a_file(formed, in_files):
    model, given = model_on("cpu")
    options = OPTIONS | {"measures": "tokenwise", "pair_tokens": 3, "pair_layers": 0}
    roomy = tracker.measure(model, given, **options)
    assert not in_files
    number = len(formed.each())
    formed.clear()
    tight = tracker.measure(model, given, **options, memory_budget=4 * ONE)
    assert len(formed.each()) == number and in_files
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


@pytest.mark.parametrize("at_once", [1, 2])
def test_beside_an_accelerator_jacobians_wait_on_the_host(
    pretend, formed, in_files, monkeypatch, at_once
):
    model, given = model_on(pretend.device)
    held = tracker.measure(model, given, **OPTIONS, **OF_ALL)
    kept = []
    on_host = layers.on_host
    monkeypatch.setattr(layers, "on_host", lambda J: kept.append(J.nbytes) or on_host(J))
    formed.clear()
    again = tracker.measure(model, given, **OPTIONS, **OF_ALL, memory_budget=2 * at_once * ONE)
    assert len(formed.each()) == len(set(formed.each())) == CALLS * SAMPLES and not in_files
    assert sum(kept) == CALLS * SAMPLES * ONE
    assert_equal(again, held)


def test_beside_a_host_without_memory_they_wait_in_a_file(pretend, formed, in_files, monkeypatch):
    model, given = model_on(pretend.device)
    held = tracker.measure(model, given, **OPTIONS, **OF_ALL)
    monkeypatch.setattr(plan, "host_memory", lambda: CALLS * ONE - 1)
    formed.clear()
    again = tracker.measure(model, given, **OPTIONS, **OF_ALL, memory_budget=2 * ONE)
    assert len(formed.each()) == len(set(formed.each())) == CALLS * SAMPLES
    assert sum(map(len, in_files)) == CALLS * SAMPLES
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
    model, given = model.to(pretend.device), torch.randint(0, 50, (8, 16))
    budget = 4_000_000
    pretend.reset_peak()
    before = pretend.live_bytes()
    tracker.measure(
        model, given, k=16, tokens="all", svd="full", measures="coupling", memory_budget=budget
    )
    assert pretend.peak_bytes() - before <= budget
