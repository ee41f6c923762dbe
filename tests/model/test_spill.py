"""Recordings beyond their budget are in files: the same numbers, in less memory, and no file is left."""

import ctypes

import pytest
import torch

import tracker
from benchmarks import shapes
from benchmarks.machine import status
from tests.support import processes
from tests.support.home_made import LM, WIDTH, Flat
from tests.support.models import tokens
from tests.support.refused import refused
from tests.support.units import assert_same
from tracker.blocks.find import find_blocks
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import batches
from tracker.model.recorder import record
from tracker.model.recording import Spill
from tracker.model.replica import Replica

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_values_are_kept_in_memory_and_beyond_it(directory, dtype):
    given = (100 * torch.randn(2, 3, 5)).to(dtype)
    spill = Spill(given.nbytes)
    assert spill.keep(given) is given
    for tensor in (given, given.transpose(0, 2), given[:, 1:]):
        kept = spill.keep(tensor)
        assert (
            torch.equal(kept, tensor)
            and kept.dtype == dtype
            and kept.untyped_storage().nbytes() == tensor.nbytes
        )
        assert kept.data_ptr() != tensor.data_ptr()
    assert not any(directory.iterdir())


def test_what_went_to_a_file_takes_no_memory():
    spill = Spill(1000)
    spill.keep(torch.randn(500))
    small = torch.randn(100)
    assert spill.keep(small) is small


def test_a_part_of_something_larger_is_copied_out():
    whole = torch.randn(3, 100)
    assert Spill(10_000).keep(whole[1]).untyped_storage().nbytes() == 400


OF_BLOCKS = ["coupling", "products", "normality", "depth_use"]


class Remembering(Flat):
    """A block that makes a table at its first call and keeps it."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(WIDTH, dtype=x.dtype, device=x.device)
        return super().forward(x * self.table)


def test_recordings_in_a_device_s_memory_and_in_files_are_measured_together(pretend, monkeypatch):
    """Also by blocks that are checked with states from a file."""
    model, inputs = LM(Remembering).to(pretend.device), [tokens(1), tokens(1, 5)]
    options = dict(
        tokenizer=lambda text, **_: {"input_ids": inputs[int(text)]},
        blocks="blocks",
        measures=OF_BLOCKS,
        k=4,
        dtype="float64",
    )
    usual = tracker.measure(model, ["0", "1"], **options)
    made, init = [], Spill.__init__
    monkeypatch.setattr(
        Spill, "__init__", lambda self, _: init(self, (0, 1 << 30)[len(made)]) or made.append(self)
    )
    spilled = tracker.measure(model, ["0", "1"], **options)
    assert len(made) == 2 and set(spilled) == set(usual)
    names = ("lyapunov_exponent", "mean_alignment", "linear_error")
    assert_same(spilled, usual, names, rtol=1e-8, atol=1e-10)


def in_use() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back
    return status("RssAnon")


@pytest.mark.slow
def test_memory_in_use_does_not_grow_with_the_recording():
    model = shapes.model("70m", 6, "cpu", vocabulary=128)
    inputs = torch.randint(128, (1, 1024))
    replica = Replica(model, find_blocks(model), torch.float32, CPU)
    (batch,) = batches(model, inputs, None, None)
    grown = {}
    with preserve_global_state(CPU):
        for memory in (0, 0, 1 << 30):  # the first pass also sets libraries up
            before = in_use()
            recording = record(replica, batch.arguments, batch.keywords, memory)
            grown[memory] = in_use() - before
            size = recording.nbytes()
            del recording
    assert size > 35e6
    assert grown[0] < 0.3 * size < grown[1 << 30]


@pytest.mark.parametrize("entries, room", [(100_000, 200_000), (1000, 1000)])
def test_a_full_disk(directory, entries, room):
    said = f"{directory} has no space for another {4e-6 * entries:.3g} MB; set TMPDIR to a directory with more space"
    with processes.files_of_at_most(room), refused(said):
        Spill(0).keep(torch.randn(entries))
    assert not any(directory.iterdir())
