"""Measures of the states: the response to noise, token by token, and what is undefined."""

from dataclasses import replace

import pytest
import torch

from tests.support.asked import IDS, Model
from tests.support.measured import CPU
from tests.support.models import build, random
from tracker.blocks.find import find_blocks
from tracker.linalg.transfer import drawn
from tracker.measures.states import (
    NOISE,
    cosine_to,
    noise_similarity,
    principal_axes_of_samples,
)
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import batches
from tracker.model.recorder import record
from tracker.model.replica import Replica


def test_noise_on_the_tokens_of_a_sample():
    """All levels scale one draw of the sample; padding gets none."""
    model, inputs = build("gpt_neox")
    (batch,) = batches(model, inputs, None, None)
    valid, seeds = [range(7), [0, 2, 3]], [3, 5]
    with preserve_global_state(CPU):
        replica = Replica(model, find_blocks(model), torch.float64, CPU)
        recording = record(replica, batch.arguments, batch.keywords)
        calls = recording.calls
        found = noise_similarity(replica, replace(recording, sample_seeds=seeds), valid)
        assert found.shape == (len(NOISE), len(calls) + 1, 2, 7)
        for i, level in enumerate(NOISE):
            x = calls[0].x.clone()
            for b, at in enumerate(valid):
                for t, noise in zip(at, drawn((len(at), x.shape[-1]), seeds[b]), strict=True):
                    x[b, t] += level * noise * calls[0].x[b, t].square().mean().sqrt()
            for depth in range(len(calls) + 1):
                clean = calls[depth].x if depth < len(calls) else calls[-1].y
                cosine = (x * clean).sum(-1) / x.norm(dim=-1) / clean.norm(dim=-1)
                torch.testing.assert_close(found[i, depth], cosine)
                if depth < len(calls):
                    with replica.materialize(calls[depth].block):
                        x = calls[depth](x)


def test_the_cosine_with_a_state_of_zero_is_undefined():
    clean = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])
    (first, same) = cosine_to([clean + torch.tensor([1.0, 0.0]), clean], clean)
    expected = torch.tensor([[torch.nan, (4 * 3 + 4 * 4) / (32**0.5 * 5)]])
    torch.testing.assert_close(first, expected, equal_nan=True)
    torch.testing.assert_close(same, torch.tensor([[torch.nan, 1.0]]), equal_nan=True)


@pytest.fixture(scope="module")
def recorded():
    """A pass of a model without a known head, which returns states."""
    model = Model()
    (batch,) = batches(model, IDS, None, None)
    with preserve_global_state(CPU):
        replica = Replica(model, find_blocks(model), torch.float32, CPU)
        return record(replica, batch.arguments, batch.keywords)


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3), (3, 3)])
def test_principal_axes_are_those_of_states_without_padding(lengths):
    y = random(2, 5, 8)
    found = principal_axes_of_samples(y, [range(n) for n in lengths])
    for n, x, mean, axes in zip(lengths, y, *found, strict=True):
        torch.testing.assert_close(mean, x[:n].mean(0))
        expected = torch.linalg.svd(x[:n] - mean).Vh[:2].mT
        assert ((axes * expected).sum(0).abs() - 1).abs().max() < 1e-9
