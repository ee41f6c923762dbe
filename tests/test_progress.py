"""The progress bars of `tracker.measure` and of walks: where they are shown, and that the former moves in equal steps."""

import io
import sys
from itertools import pairwise

import pytest
import torch

import tracker
from tests.support.lightning_runs import fit, trainer
from tests.support.models import neox, tokens
from tracker.blocks.prepare import prepare
from tracker.common import progress
from tracker.common.progress import Progress
from tracker.measures.calls import measure_calls
from tracker.measures.options import settings_from
from tracker.model.inputs import batches
from tracker.walk import display as of_walks

METHODS = {
    "full": {"svd": "full"},
    "krylov": {"svd": "krylov", "k": 4},
    "in a file": {
        "memory_budget": 20_000,
        "measures": ["coupling", "vju"],
        "final_norm": "exclude",
    },
    "in a file, of blocks": {
        "memory_budget": 20_000,
        "measures": ["coupling", "products", "depth_use"],
    },
    "tokens": {"tokens": [0, 3, -1]},
    "tokenwise": {"measures": ["tokenwise"], "pair_tokens": 3},
    "tokenwise in few bytes": {
        "measures": ["tokenwise", "coupling"],
        "pair_tokens": 3,
        "memory_budget": 40_000,
    },
    "states alone": {"measures": ["trajectory", "noise"]},
}


class Recorded(Progress):
    """Keeps the share that a bar would show."""

    def __init__(self):
        super().__init__()
        self.shares = [0.0]

    def advance(self, steps):
        super().advance(steps)
        self.shares.append(self.done / self.expected)


def inputs(settings):
    """Four prompts of one forward call each where there is nothing else to count, else one call."""
    x = tokens(4)
    return [{"input_ids": row[None]} for row in x] if not settings.forms_jacobians else [x]


@pytest.mark.parametrize("method", METHODS)
def test_the_bar_moves_in_equal_steps_and_ends_at_the_end(method):
    model, settings = neox(), settings_from(METHODS[method], "test")
    calls = [batch for given in inputs(settings) for batch in batches(model, given, None, None)]
    shown = Recorded()
    with prepare(model, None, calls, torch.device("cpu"), settings.torch_dtype) as replica:
        measure_calls(replica, calls, settings, shown)
    jumps = [after - before for before, after in pairwise(shown.shares)]
    assert shown.shares[-1] == pytest.approx(1)
    assert len(jumps) >= 3 and min(jumps) > 0 and max(jumps) < 0.34


STREAMS = {
    "terminal": {"isatty": lambda self: True},
    "pipe": {},
    "notebook": {"__module__": "ipykernel.iostream"},
}


@pytest.mark.parametrize(
    "stream, delay, shown, expected",
    [
        ("terminal", 0.0, None, True),
        ("terminal", 3600.0, None, False),  # over before the bar is due
        ("terminal", 0.0, False, False),
        ("notebook", 0.0, None, True),
        ("pipe", 0.0, None, False),
        ("pipe", 0.0, True, True),
    ],
)
def test_the_bar_appears_on_a_terminal_alone_and_when_asked_for(
    stream, delay, shown, expected, monkeypatch
):
    kind = type("OutStream", (io.StringIO,), STREAMS[stream])
    monkeypatch.setattr(sys, "stderr", written := kind())
    monkeypatch.setattr(progress, "DELAY", delay)
    tracker.measure(neox(), tokens(), progress=shown)
    assert ("measuring" in written.getvalue()) == expected


def test_other_ranks_show_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, shown in ((0, True), (1, False)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        tracker.measure(neox(), tokens(), progress=True)
        assert ("measuring" in capsys.readouterr().err) == shown


def test_the_callback_shows_none(monkeypatch, capsys):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "is_interactive", lambda: True)
    fit(trainer([tracker.CouplingCallback(steps=[1], k=2)], max_steps=2))
    assert "measuring" not in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_a_walk_prints_lines_and_shows_bars_on_a_terminal_alone(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with of_walks.progress(2) as shown:
        count = shown.downloading("step1", 3_000_000)
        for _ in range(3):
            count(1_000_000)
        shown.advance("step 1: one")
        shown.advance("step 2: two")
    said = capsys.readouterr()
    fetched, first, last = said.out.splitlines()
    assert fetched.startswith("step1: 3 MB of 3 MB fetched, ") and fetched.endswith(" MB/s")
    assert first.startswith("[1/2] step 1: one  about ") and last == "[2/2] step 2: two"
    assert ("fetching step1" in said.err) == ("measuring" in said.err) == terminal
