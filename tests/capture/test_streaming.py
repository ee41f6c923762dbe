"""Weights on their way from the host to an accelerator: how many bytes, when, and that the results are the same."""

import threading
import time

import numpy as np
import pytest
import torch

import tracker
from tests.models import Size, language, tokens
from tests.rounding import of_miscouplings, rounding
from tracker.blocks.find import find_blocks
from tracker.capture import weights as streaming
from tracker.capture.global_state import preserve_global_state
from tracker.capture.replica import Replica

WIDTH, DEPTH = 64, 4
OPTIONS = {"k": 5, "measures": "coupling", "svd": "krylov", "final_norm": "exclude"}


def model(dtype=torch.float16):
    return language("GPTNeoXForCausalLM", intermediate_size=4 * WIDTH)(Size(WIDTH, DEPTH)).to(dtype)


def nbytes(*modules) -> int:
    return sum(t.nbytes for module in modules for t in (*module.parameters(), *module.buffers()))


def replica_of(given, device) -> Replica:
    return Replica(given, find_blocks(given), torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_streamed_results_are_those_of_a_model_on_the_device(pretend, dtype):
    streamed = tracker.measure(model(dtype), tokens(1), device=pretend.device, **OPTIONS)
    torch.manual_seed(0)
    resident = tracker.measure(model(dtype).to(pretend.device), tokens(1), **OPTIONS)
    torch.manual_seed(0)
    on_cpu = tracker.measure(model(dtype), tokens(1), **OPTIONS)
    for name in ("miscoupling", "singular_value"):
        np.testing.assert_array_equal(streamed[name], resident[name])
    np.testing.assert_allclose(streamed.miscoupling, on_cpu.miscoupling, rtol=0, atol=of_miscouplings(on_cpu))
    atol = rounding(torch.float32) * float(on_cpu.singular_value.max())
    np.testing.assert_allclose(streamed.singular_value, on_cpu.singular_value, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
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
            assert all(weight.dtype == torch.float32 and weight.device == pretend.device for weight in weights)
        assert counts.bytes_to_device == narrower * nbytes(expected)
    for weight, expected in zip(weights, given.gpt_neox.embed_in.parameters(), strict=True):
        assert torch.equal(weight.cpu(), expected.float())


def test_weights_travel_once_for_the_forward_pass_and_once_for_the_jacobians(pretend):
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
    assert copied["host"] - copied["device"] == 2 * blocks + outside


def test_next_block_is_copied_while_one_is_in_use(pretend, monkeypatch):
    threads, copied = [], [threading.Event() for _ in range(DEPTH)]
    copy = streaming._copy

    def record(weights, device):
        found = copy(weights, device)
        threads.append(threading.current_thread())
        copied[len(threads) - 1].set()
        return found

    monkeypatch.setattr(streaming, "_copy", record)
    replica = replica_of(model(), pretend.device)
    for l, block in enumerate(replica.blocks):
        with replica.materialize(block):
            assert all(event.wait(300) for event in copied[: l + 2])
            assert len(threads) == min(l + 2, DEPTH)
    assert threading.current_thread() not in threads


def test_copies_do_not_wait_for_the_device_and_do_not_make_it_wait(pretend):
    replica = replica_of(model(), pretend.device)
    with pretend.count() as counts:
        for block in replica.blocks:
            with replica.materialize(block):
                pass
    assert counts.to_device == 12 * DEPTH and counts.syncs == 0


def test_a_weight_is_read_after_its_copy_is_finished(pretend, monkeypatch):
    """The stream that computes waits for the event that follows the copies, and their memory is kept for it."""
    log = []

    class Stream(torch.Stream):
        def __enter__(self):
            log.append("enter")
            return super().__enter__()

        def __exit__(self, *error):
            log.append("exit")
            return super().__exit__(*error)

        def record_event(self, event=None):
            log.append("record")
            return super().record_event(event)

        def wait_event(self, event):
            log.append("wait")
            return super().wait_event(event)

    monkeypatch.setattr(streaming, "_stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    record_stream = torch.Tensor.record_stream
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *given: log.append("kept") or record_stream(*given))
    replica = replica_of(model(), pretend.device)
    with replica.materialize(replica.blocks[-1]):
        weights = len(list(replica.blocks[-1].parameters()))
    assert log == ["enter", "record", "exit", "wait", *["kept"] * weights]


def test_a_copy_that_fails_ends_the_measurement(pretend):
    given = model()
    sizes = nbytes(*given.gpt_neox.layers[:1])
    with pretend.memory_limit(pretend.live_bytes() + 3 * sizes), pytest.raises(torch.OutOfMemoryError):
        tracker.measure(given, tokens(1), device=pretend.device, **OPTIONS)
    tracker.measure(given, tokens(1), device=pretend.device, **OPTIONS)


def test_a_measurement_that_fails_waits_for_the_copy_of_the_next_block(pretend, monkeypatch):
    """Its memory would be taken from another attempt."""
    given, copy, copies = model(), streaming._copy, []

    def slow(weights, device):
        if copies:
            time.sleep(0.2)
        copies.append(copy(weights, device))
        return copies[-1]

    monkeypatch.setattr(streaming, "_copy", slow)
    with pretend.failing("aten::_softmax"), pytest.raises(torch.AcceleratorError):  # in the first block
        tracker.measure(given, tokens(1), device=pretend.device, **OPTIONS)
    assert len(copies) == 2


def test_device_memory_is_that_of_two_blocks(pretend):
    given = model()
    replica = replica_of(given, pretend.device)
    before = pretend.live_bytes()
    pretend.reset_peak()
    with preserve_global_state(pretend.device):
        for block in replica.blocks:
            with replica.materialize(block):
                pass
    block = nbytes(given.gpt_neox.layers[0])
    assert pretend.live_bytes() == before
    assert (
        pretend.peak_bytes() - before <= 4 * block
    )  # one in float32, and the next and, until it is cast, itself in float16


def test_what_a_block_writes_into_its_weights_is_not_in_the_next_copy(pretend):
    replica = replica_of(model(torch.float32), pretend.device)
    first, second = replica.blocks[:2]
    for block in (first, second):  # copied when it is needed, copied before
        with replica.materialize(block):
            before = block.attention.dense.weight.cpu()
            block.attention.dense.weight.add_(1)
        with replica.materialize(block):
            assert torch.equal(block.attention.dense.weight.cpu(), before)


def test_a_measurement_on_the_cpu_starts_no_thread(monkeypatch):
    monkeypatch.setattr(streaming, "_worker", lambda device: pytest.fail("a thread"))
    tracker.measure(model(), tokens(1), **OPTIONS)


def test_a_weight_whose_elements_share_memory_is_copied(pretend):
    given = model(torch.float32)
    norms = [block.input_layernorm for block in given.gpt_neox.layers]
    for norm in norms:
        norm.weight = torch.nn.Parameter(torch.tensor([0.5]).expand(WIDTH))
    found = tracker.measure(given, tokens(1), device=pretend.device, **OPTIONS)
    expected = tracker.measure(given, tokens(1), **OPTIONS)
    np.testing.assert_allclose(found.miscoupling, expected.miscoupling, rtol=0, atol=of_miscouplings(expected))
    assert all(norm.weight.stride() == (0,) for norm in norms)
