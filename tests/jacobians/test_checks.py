"""The derivative check in a window of the sequence: every family passes, attentions in series do not."""

import math

import pytest
import torch

from tests.jacobians.measured import CPU, recorded
from tests.jacobians.test_rows import Inner, Stack, random
from tests.models import FAMILIES, build
from tracker.jacobians import checks
from tracker.jacobians.checks import derivative_error
from tracker.jacobians.row_attention import by_formula, by_own_code
from tracker.jacobians.slicing import Rows, cut_windows
from tracker.linalg.precision import TOLERANCE
from tracker.model.global_state import preserve_global_state


@pytest.fixture
def windows(monkeypatch):
    """Collect the lengths of the sequences that checks use, with windows of two tokens."""
    lengths, at = [], checks._derivative_error_at
    monkeypatch.setattr(checks, "WINDOW", 2)
    monkeypatch.setattr(
        checks,
        "_derivative_error_at",
        lambda call, rows, **given: (lengths.append(call.x.shape[1]), at(call, rows, **given))[1],
    )
    with preserve_global_state(CPU):
        yield lengths


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.full])
def test_every_family_passes_in_a_window(name, windows):
    model, inputs = build(name)
    replica, (calls,) = recorded(model, [inputs])
    n = calls[0].x.shape[1]
    rows = Rows(torch.tensor([0, 1]), torch.tensor([n - 1, n - 1]))
    for call in calls:
        with replica.materialize(call.block):
            assert derivative_error(call, rows, by_own_code) <= TOLERANCE[torch.float64]
    if n > 4:
        assert set(windows) == {2}


def test_attentions_in_series_fail_it(windows):
    torch.manual_seed(0)
    replica, (calls,) = recorded(Stack([Inner(False), Inner(True)]).double(), [random(1, 6, 8)])
    for call, holds in zip(calls, (True, False), strict=True):
        with replica.materialize(call.block):
            error = derivative_error(call, Rows(torch.tensor([0]), torch.tensor([5])), by_formula)
            assert (error <= 1e-9) == holds
    assert windows == [6, 6]  # blocks with two attentions are compared in the whole


@pytest.mark.parametrize("name", ["gpt_neox", "timm vit"])
def test_what_fails_in_a_window_has_another_chance_in_the_whole(name, windows, monkeypatch):
    model, inputs = build(name)
    replica, (calls,) = recorded(model, [inputs])
    n = calls[0].x.shape[1]
    monkeypatch.setattr(
        checks, "tolerance", lambda dtype, rounded: -1.0 if len(windows) == 1 else 1e-9
    )
    rows = Rows(torch.tensor([0, 1]), torch.tensor([n - 1, n - 1]))
    with replica.materialize(calls[0].block):
        assert derivative_error(calls[0], rows, by_own_code) <= 1e-9
    assert windows == [2, n]


def test_a_window_of_a_block_is_the_block_on_those_tokens():
    with preserve_global_state(CPU):
        model, inputs = build("llama, grouped keys")
        replica, (calls,) = recorded(model, [inputs])
        rows = Rows(torch.tensor([0, 1]), torch.tensor([6, 0]))
        call, at = cut_windows(calls[0], rows, 3)
        assert at.token.tolist() == [2, 0] and at.sample.tolist() == [0, 1]
        assert torch.equal(at.select(call.x), rows.select(calls[0].x))
        with replica.materialize(call.block):
            y = call(call.x)
        # At position 0 a causal row sees itself alone
        torch.testing.assert_close(y[1, 0], calls[0].y[1, 0])
        assert not torch.allclose(y[0, 2], calls[0].y[0, 6])


@pytest.mark.parametrize("undefined", [0, 1])
def test_an_undefined_error_at_either_place_is_kept(monkeypatch, undefined):
    model, inputs = build("gpt_neox")
    replica, (calls,) = recorded(model, [inputs])
    errors = iter(float("nan") if place == undefined else 0.0 for place in range(2))
    at = lambda *given, **options: (torch.tensor(next(errors)), False)  # noqa: E731
    monkeypatch.setattr(checks, "_derivative_error_at", at)
    rows = Rows(torch.tensor([0, 0]), torch.tensor([2, 6]))
    with replica.materialize(calls[0].block):
        assert math.isnan(derivative_error(calls[0], rows, by_own_code))
