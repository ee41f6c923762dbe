"""Tests of the sweep: it accepts right measurements and detects each type of fault."""

import pytest
import torch
from torch import nn

import tracker
from tests.conftest import ROOT
from tests.sweep import catalogue, judge, oracle, table, tiny
from tracker.common.errors import UsageError

measure = tracker.measure


@pytest.fixture(scope="module")
def llama():
    return catalogue.builder("LlamaForCausalLM", "causal")()


def outcome(monkeypatch, built, measured=measure):
    monkeypatch.setattr(tracker, "measure", measured, raising=False)
    return judge.judge(built.model.__class__.__name__, "causal", lambda: built)


@pytest.mark.slow
def test_right_measurement_is_accepted(monkeypatch, llama):
    found = outcome(monkeypatch, llama)
    assert found.outcome == "right" and found.error < 1e-12
    assert found.blocks.startswith("4: model.layers.0")


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["singular_value", "offdiag_normalized", "norm"])
def test_wrong_numbers_are_detected(monkeypatch, llama, variable):
    def wrong(*args, **settings):
        ds = measure(*args, **settings)
        ds[variable] = ds[variable] + 1e-4
        return ds

    found = outcome(monkeypatch, llama, wrong)
    assert found.outcome == "wrong" and found.detail.startswith(
        variable.replace("singular_value", "singular values")
    )


@pytest.mark.slow
def test_missing_blocks_are_detected(monkeypatch, llama):
    def fewer(model, inputs, **settings):
        return measure(model, inputs, blocks=[f"model.layers.{l}" for l in range(3)], **settings)

    assert outcome(monkeypatch, llama, fewer).outcome == "wrong"


@pytest.mark.slow
def test_refusals_exceptions_and_changed_models_are_detected(monkeypatch, llama):
    def refuses(*args, **settings):
        raise UsageError("not this model\nas it is")

    def raises(*args, **settings):
        raise KeyError("weights")

    def writes(model, *args, **settings):
        with torch.no_grad():
            next(model.parameters()).mul_(1)
        return measure(model, *args, **settings)

    def leaves_hooks(model, *args, **settings):
        model.register_forward_hook(lambda *call: None)
        return measure(model, *args, **settings)

    refused = outcome(monkeypatch, llama, refuses)
    assert (refused.outcome, refused.detail) == ("refused", "not this model")
    assert outcome(monkeypatch, llama, raises).outcome == "raw exception"
    assert outcome(monkeypatch, llama, writes).outcome == "changed"
    assert outcome(monkeypatch, llama, leaves_hooks).outcome == "changed"


class Fused(nn.Module):
    """Blocks that return a second stream, to which the next block adds the first."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Linear(8, 8)

        def forward(self, x, rest):
            rest = x + rest
            return self.attention(rest.tanh()), rest

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, ids):
        x, rest = self.embed(ids), torch.zeros(1, dtype=self.embed.weight.dtype)
        for layer in self.layers:
            x, rest = layer(x, rest)
        return x + rest


def assert_wrong(model, blocks, message):
    built = catalogue.Built(model.double(), {"ids": torch.arange(10).reshape(2, 5)}, True)
    graph = oracle.run(built.fresh(), built.inputs, blocks)
    with pytest.raises(judge.Wrong, match=message):
        judge.tower(built, built.inputs, graph, judge.Outcome("any", "causal", "right"))


def test_ignored_second_stream_is_detected():
    assert_wrong(Fused(), [f"layers.{l}" for l in range(3)], "second tensor")


class Towers(nn.Module):
    """Two parallel towers, or one after the other."""

    def __init__(self, behind: bool):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.first = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.second = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.behind = behind

    def forward(self, ids):
        x = start = self.embed(ids)
        for layer in self.first:
            x = x + layer(x, x, x)[0]
        y = x if self.behind else start
        for layer in self.second:
            y = y + layer(y, y, y)[0]
        return y if self.behind else x + y


@pytest.mark.parametrize("behind", [False, True])
def test_wrong_tower_is_detected(behind):
    assert_wrong(Towers(behind), ["first.0", "first.1"], "between" if behind else "beside")


def test_oracle_returns_jacobians_of_single_blocks():
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    graph = oracle.run(nn.Sequential(block), {"input": x}, ["0"])
    J = torch.func.jacrev(block)(x[1, 2]) - torch.eye(6)
    torch.testing.assert_close(graph.jacobians(0, 1, 2, None), J)


def test_tiny_configurations_keep_each_type_of_layer():
    from transformers import Gemma3TextConfig

    config = tiny.tiny(Gemma3TextConfig)
    assert config.num_hidden_layers == tiny.DEPTH and config.sliding_window == tiny.WINDOW
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


@pytest.mark.slow
def test_each_class_is_in_one_group():
    groups = [set(catalogue.classes(group)) for group in catalogue.GROUPS]
    assert all(len(group) > 50 for group in groups)
    assert sum(map(len, groups)) == len(set.union(*groups))


def test_page_in_the_docs_counts_the_rows():
    outcomes = table.read(ROOT / "docs" / "sweep.csv")
    assert len({(outcome.name, outcome.group) for outcome in outcomes}) == len(outcomes) > 500
    assert {outcome.outcome for outcome in outcomes} <= set(table.ORDER)
    page = (ROOT / "docs" / "sweep.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("|")] == table.table_of_counts(
        outcomes
    )
    assert f"At fault or too slow: {', '.join(table.unsettled(outcomes)) or 'none'}.\n" in page


def test_sweep_writes_a_page_and_its_rows(tmp_path):
    outcomes = [
        judge.Outcome(
            "A", "causal", "right", "", 2e-7, '4: model.layers.0, "norm"', "", "backward"
        ),
        judge.Outcome("B", "vision", "refused", "two | streams, both change"),
        judge.Outcome("C", "vision", "wrong", "lss: error 1", 1.0, note="in float32"),
    ]
    table.write(str(tmp_path / "swept.md"), outcomes, "python -m tests.sweep")
    assert repr(table.read(tmp_path / "swept.csv")) == repr(outcomes)
    page = (tmp_path / "swept.md").read_text()
    assert "| vision | 0 | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 2 |  |" in page
    assert "| all | 1 | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 3 | 2e-07 |" in page
    assert "[swept.csv](swept.csv)" in page and "At fault or too slow: C (wrong).\n" in page
