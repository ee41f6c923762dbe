"""What the checks compare, and where, for functions whose errors are known."""

import math
from dataclasses import replace

import pytest
import torch

from tests.jacobians.measured import recorded
from tests.models import build
from tracker.jacobians import checks
from tracker.jacobians.checks import (
    BESIDE,
    _error_beside_at,
    _largest_error,
    _mixing_by_derivative,
    _mixing_by_value,
    _places,
    find_mixing,
    quality,
)
from tracker.jacobians.row_attention import by_formula
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.linalg.jacobian import Linearization
from tracker.linalg.precision import FLOOR
from tracker.model.recording import BlockCall

FOUR = torch.randint(30, (4, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def call():
    """A call of four samples of seven tokens."""
    _, ((call, *_),) = recorded(build("gpt_neox")[0], [FOUR])
    return call


def rows_of(*places, source=None):
    sample, token = map(torch.tensor, zip(*places, strict=True))
    return Rows(sample, token, source)


@pytest.mark.parametrize(
    ("rows", "places"),
    [
        ([(0, 3)], [[(0, 3)]]),
        ([(0, 2), (0, 5), (0, 4)], [[(0, 2)], [(0, 5)]]),
        ([(1, 0), (1, 4)], [[(1, 4)]]),  # nothing is checked at position 0
        ([(1, 0)], [[(1, 6)]]),
        ([(2, 1), (0, 3), (1, 2), (2, 4), (1, 5)], [[(0, 3), (2, 1)], [(0, 3), (2, 4)]]),
        ([(3, 2), (3, 6), (0, 0)], [[(0, 6), (3, 2)], [(0, 6), (3, 6)]]),
    ],
)
def test_the_first_and_the_last_row_of_the_first_and_the_last_sample(rows, places):
    found = _places(rows_of(*rows), 7)
    assert [[*zip(p.sample.tolist(), p.token.tolist(), strict=True)] for p in found] == places


@pytest.mark.parametrize("errors", [(0.25, 0.5), (0.5, 0.25)])
def test_the_larger_error_of_two_places_is_returned(call, errors, monkeypatch):
    monkeypatch.setattr(checks, "_error_in_windows", lambda *_: None)
    of_places = iter(errors)
    at = lambda call, place: (torch.tensor(next(of_places)), False)  # noqa: E731
    assert _largest_error(call, rows_of((0, 2), (0, 5)), at) == 0.5


@pytest.mark.parametrize("source", [None, torch.tensor([1, 2])])
def test_values_at_other_states_are_compared_without_the_state(call, source, monkeypatch):
    rows = rows_of((0, 3), (2, 5), source=source)
    update = 0.1 * rows.select(call.x)
    given = []

    def block(factor):
        def f(x):
            given.append(x)
            before = x if source is None else rows.select(call.x)
            return before + factor * update

        return lambda *_: f

    monkeypatch.setattr(checks, "restrict", block(1.5))
    monkeypatch.setattr(checks, "full_sequence", block(1.0))
    error, _ = _error_beside_at(call, rows, by_formula, False)
    assert float(error) == pytest.approx(0.5)
    at_rows, in_full = given
    assert torch.equal(at_rows, in_full)
    moved, size = at_rows - rows.select_sources(call.x), rows.select_sources(call.x).norm(dim=-1)
    assert ((moved.norm(dim=-1) / size - BESIDE).abs() < 0.15).all()


def test_what_rounding_hides():
    J = torch.eye(16).expand(2, -1, -1).clone()
    J[1] *= FLOOR[torch.float32]
    assert quality(1.01 * J, torch.float32).tolist() == [True, False]
    assert quality(0.99 * J, torch.float32).tolist() == [True, True]
    assert quality(1e-9 * J, torch.float64).tolist() == [True, False]
    J[0, 3, 4] = math.inf
    assert quality(J, torch.float64).tolist() == [False, False]


@pytest.mark.parametrize("leak", [0.0, 1e-3, math.nan])
def test_derivatives_by_other_samples(call, leak):
    """Sample 2's outputs depend on sample 1; NaN is 0 times an infinite derivative."""
    shape = call.x.shape

    def pullback(u):
        of_samples = u.unflatten(1, shape[:2])
        gradients = 1.5 * of_samples  # the identity, and half of it
        gradients[:, 1] += leak * of_samples[:, 2] if leak == leak else torch.nan
        return gradients.flatten(1, 2)

    block = Linearization(call.y.flatten(0, 1), pullback)
    found = _mixing_by_derivative(call, block, 1e-12)
    assert ("derivative with respect to sample 1 " in found) == (leak == 1e-3), found
    if leak == 1e-3:
        _, _, size = found.partition("relative size ")
        assert float(size.removesuffix(")")) == pytest.approx(2 * leak, rel=0.5)


class Called(BlockCall):
    """A call whose samples take a part of what the others' last tokens are."""

    def __init__(self, x, share):
        self.__dict__.update(x=x, share=share, states=[])

    def __call__(self, x):
        self.states.append(x)
        others = x[:, -1].sum(0) - x[:, -1]
        return 2 * x + self.share * (others / others.norm())[:, None]


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_values_that_change_with_the_states_of_others(share):
    x = torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    call = Called(x, share)
    found = _mixing_by_value(call, call(x))
    assert found.startswith("outputs of samples 0, 1 change with") == (share > 0), found
    # The states of the others are close to that of a sample whose outputs are compared.
    for state, own in zip(call.states[1:], ([0, 1], [2, 3]), strict=False):
        others = [b for b in range(4) if b not in own]
        assert torch.equal(state[own], x[own])
        assert ((state[others] - x[own[0], -1]).abs() < 0.01).all()


def test_windows_end_at_the_requested_rows_or_the_last_token(call, monkeypatch):
    found = []

    def cut(call, rows, width):
        found.append((rows.sample.tolist(), rows.token.tolist(), width))
        raise NotSliceable("planted")

    monkeypatch.setattr(checks, "cut_windows", cut)
    monkeypatch.setattr(checks, "WINDOW", 4)
    monkeypatch.setattr(checks, "_mixing_in", lambda call: "in full")
    assert find_mixing(call, rows_of((0, 3), (2, 5), (2, 4))) == "in full"
    assert found == [([0, 1, 2, 3], [3, 6, 5, 6], 2)]
    whole = replace(call, x=call.x[:, :2])
    assert find_mixing(whole, rows_of((0, 1))) == "in full" and len(found) == 1
