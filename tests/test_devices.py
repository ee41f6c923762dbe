"""Measurements on accelerators: their random state is unchanged, and devices without float64 are refused or avoided."""

import pytest
import torch
from torch import nn

import tracker
from tests.support.draws import normal
from tests.support.lightning_runs import Classifier
from tests.support.refused import refused
from tests.support.units import assert_same
from tracker.provenance import usable_device

PROBE = normal(3, 6, 8)


class WithClassToken(Classifier):
    """A classifier whose class token is checked by forward passes from a fixed seed; one of them draws on the device."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.ones(1, 1, 16))

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.embed(x)], 1)
        x = x + 0 * torch.rand(1, device=x.device)
        for block in self.stages:
            x = block(x)
        return self.head(x[:, 0])


@pytest.mark.parametrize("where", ["pretend", "cpu"])
def test_the_random_state_of_an_accelerator_is_unchanged(pretend, where):
    """Also if the CPU measures: a training may use the accelerator's random state."""
    model = WithClassToken()
    torch.manual_seed(5)
    torch.rand(7, device=pretend.device)
    before = [torch.get_rng_state(), torch.get_device_module(pretend.device).get_rng_state()]
    found = tracker.measure(
        model, PROBE, k=2, device=pretend.device if where == "pretend" else "cpu"
    )
    after = [torch.get_rng_state(), torch.get_device_module(pretend.device).get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert found.sizes["prompt"] == 3


def test_a_device_without_an_index_gets_the_one_of_its_tensors(pretend):
    """Threads have current devices of their own: in another one, the name alone could be another device."""
    assert (
        usable_device("pretend", "")
        == torch.device("pretend", 0)
        == torch.ones(1, device="pretend").device
    )
    assert usable_device("cpu", "") == torch.ones(1).device


def test_a_device_without_float64_is_refused(pretend):
    with (
        pretend.without_float64(),
        refused("'pretend:0' can't be used: pretend has no float64"),
    ):
        tracker.measure(Classifier(), PROBE, k=2, device=pretend.device)


def test_a_model_on_a_device_without_float64_is_measured_on_the_cpu(pretend):
    model = Classifier()
    expected = tracker.measure(model, PROBE, k=2)
    model.to(pretend.device)
    with pretend.without_float64():
        found = tracker.measure(model, PROBE, k=2)
    assert found.attrs["device"] == "cpu" and next(model.parameters()).device == pretend.device
    assert_same(found, expected, ("miscoupling", "singular_value"))
