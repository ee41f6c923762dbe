"""Weights that pass block by block from the host to an accelerator: bytes, memory, and the same results."""

import numpy as np
import pytest
import torch

import tracker
from tests.support.models import Size, language, tokens
from tests.support.rounding import of_miscouplings
from tracker.blocks.find import find_blocks
from tracker.model.global_state import preserve_global_state
from tracker.model.replica import Replica

WIDTH, DEPTH = 64, 4
OPTIONS = {
    "k": 5,
    "measures": "coupling",
    "svd": "krylov",
    "final_norm": "exclude",
    "witness": "off",
}


def model(dtype=torch.float16):
    return language("GPTNeoXForCausalLM", intermediate_size=4 * WIDTH)(Size(WIDTH, DEPTH)).to(dtype)


def nbytes(*modules) -> int:
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))


def replica_of(given, device) -> Replica:
    return Replica(given, find_blocks(given), torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_travel_as_they_are_stored_or_measured_whichever_is_narrower(pretend, dtype):
    given = model(dtype)
    replica = replica_of(given, pretend.device)
    narrower = min(dtype.itemsize, 4) / dtype.itemsize
    for module, expected in (
        (replica.blocks[-1], given.gpt_neox.layers[-1]),
        (replica.module.gpt_neox.embed_in, given.gpt_neox.embed_in),
    ):
        with pretend.count() as counts, replica.materialize(module):
            weights = list(module.parameters())
            assert all(
                weight.dtype == torch.float32 and weight.device == pretend.device
                for weight in weights
            )
        assert counts.bytes_to_device == narrower * nbytes(expected)
    for weight, expected in zip(weights, given.gpt_neox.embed_in.parameters(), strict=True):
        assert torch.equal(weight.cpu(), expected.float())


def test_weights_travel_once_for_each_pass_and_once_for_the_jacobians(pretend):
    """The passes are the recording, and two of the copy that is asked: with gradients and with states that are moved."""
    given = model()
    blocks = nbytes(*given.gpt_neox.layers)
    budget = 2 * 2 * WIDTH**2 * 4  # for the Jacobians of two blocks
    on_host = OPTIONS | {"device": pretend.device, "memory_budget": budget}
    copied = {}
    for where in ("host", "device"):
        with pretend.count() as counts:
            tracker.measure(given, tokens(1), **on_host)
        copied[where] = counts.bytes_to_device
        given.to(pretend.device)
    outside = nbytes(given) - blocks
    assert copied["host"] - copied["device"] == 4 * blocks + 3 * outside


def test_a_copy_that_fails_ends_the_measurement(pretend):
    given = model()
    sizes = nbytes(*given.gpt_neox.layers[:1])
    with (
        pretend.memory_limit(pretend.live_bytes() + 3 * sizes),
        pytest.raises(torch.OutOfMemoryError),
    ):
        tracker.measure(given, tokens(1), device=pretend.device, **OPTIONS)
    tracker.measure(given, tokens(1), device=pretend.device, **OPTIONS)


def test_device_memory_is_that_of_one_block(pretend):
    given = model()
    replica = replica_of(given, pretend.device)
    before = pretend.live_bytes()
    pretend.reset_peak()
    with preserve_global_state(pretend.device):
        for block in replica.blocks:
            with replica.materialize(block):
                pass
    assert pretend.live_bytes() == before
    in_float32 = 2 * nbytes(given.gpt_neox.layers[0])
    # In float16, until it is cast
    largest = max(weight.nbytes for weight in given.gpt_neox.layers[0].parameters())
    assert in_float32 <= pretend.peak_bytes() - before <= in_float32 + largest


def test_what_a_block_writes_into_its_weights_is_not_in_the_next_copy(pretend):
    replica = replica_of(model(torch.float32), pretend.device)
    block = replica.blocks[0]
    with replica.materialize(block):
        before = block.attention.dense.weight.cpu()
        block.attention.dense.weight.add_(1)
    with replica.materialize(block):
        assert torch.equal(block.attention.dense.weight.cpu(), before)


def test_a_weight_whose_elements_share_memory_is_copied(pretend):
    given = model(torch.float32)
    norms = [block.input_layernorm for block in given.gpt_neox.layers]
    for norm in norms:
        norm.weight = torch.nn.Parameter(torch.tensor([0.5]).expand(WIDTH))
    found = tracker.measure(given, tokens(1), device=pretend.device, **OPTIONS)
    expected = tracker.measure(given, tokens(1), **OPTIONS)
    np.testing.assert_allclose(
        found.miscoupling, expected.miscoupling, rtol=0, atol=of_miscouplings(expected)
    )
    assert all(norm.weight.stride() == (0,) for norm in norms)
