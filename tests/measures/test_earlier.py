"""What a later measurement of a run leaves out, and what it still finds."""

import json

import pytest
import torch
from torch import nn

import tracker
import tracker.jacobians.rows
import tracker.measures.calls
from tests.jacobians.test_every_row import Block, states
from tests.jacobians.test_one_block_alone import NAMES, L, gated
from tracker.measures.earlier import TURNS

STEPS = range(2 * TURNS)


@pytest.fixture
def asked(monkeypatch):
    """The layers that are asked whether they mix samples, and about their derivative; "model" for the questions at first."""
    found = {"mixing": [], "derivative": [], "model": []}

    def counted(module, name, kind):
        original = getattr(module, name)

        def counting(*arguments, **options):
            found[kind].append(name if kind == "model" else arguments[0].layer)
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, counting)

    rows, calls = tracker.jacobians.rows, tracker.measures.calls
    counted(rows, "find_mixing", "mixing")
    for check in ("derivative_error", "error_beside"):
        counted(rows, check, "derivative")
    for question in ("check_reachability", "Witness"):
        counted(calls, question, "model")
    return found


def watched(net, steps, x=None, change=lambda step: None, **options):
    """Measure at some steps, before each of which the model changes, and yield the step and the result."""
    watch = tracker.Watch(
        every_n_steps=1, probe=states(4) if x is None else x, k=3, blocks=NAMES, **options
    )
    for step in steps:
        change(step)
        yield step, watch(step, net)
    assert not watch.skipped.reasons


def test_blocks_are_checked_in_turn(asked):
    net = gated(torch.zeros_like, 0)
    everything = list(range(1, L + 1))
    for step, unit in watched(net, STEPS):
        due = everything if step == 0 else [l for l in everything if (l + step) % TURNS == 0]
        assert sorted(set(asked["mixing"])) == due
        assert sorted(asked["derivative"]) == due
        assert asked["model"] == ["check_reachability", "Witness"] * (step % TURNS == 0)
        errors = unit["diagnostics_derivative_error"].values[0, 0]
        assert [l for l in everything if errors[l - 1] == errors[l - 1]] == due
        for found in asked.values():
            found.clear()


def test_other_hooks_are_another_model(asked):
    net = gated(torch.zeros_like, 0)

    def change(step):
        if step == 2:
            net[1].register_forward_hook(lambda *_: None)

    for step, _ in watched(net, range(4), change=change):
        assert bool(asked["model"]) == (step in (0, 2))
        assert (len(set(asked["mixing"])) == L) == (step in (0, 2))
        for found in asked.values():
            found.clear()


def test_measures_of_states_alone_ask_the_model_as_often(asked):
    for step, _ in watched(gated(torch.zeros_like, 0), STEPS, measures="trajectory"):
        assert len(asked["model"]) == 2 * (1 + step // TURNS)


@pytest.mark.parametrize("opened", range(L))
@pytest.mark.parametrize(("size", "within"), [(1.0, 1), (1e-4, TURNS)])
def test_a_block_that_begins_to_mix_samples_is_found(opened, size, within):
    """At once where its J v differs from its values, and else in its turn; the reason is named in both cases."""
    net = gated(lambda x: size * x.flip(0), opened)
    net[opened].gate.data.zero_()
    watch = tracker.Watch(every_n_steps=1, probe=states(4), k=3, blocks=NAMES)
    watch(0, net)
    net[opened].gate.data.fill_(1.0)
    with pytest.warns(UserWarning, match=rf"block {opened + 1} \({opened}\) mixes the samples"):
        for step in range(1, 1 + within):
            watch(step, net)


class Beside(nn.Sequential):
    """Give each block what the model computes from its state, through a gate."""

    def __init__(self):
        super().__init__(*(Taking() for _ in range(L)))
        self.gate = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        for l in range(L):
            x = self[l](x, self.gate * x.tanh())
        return x


class Taking(Block):
    def forward(self, x, beside):
        return super().forward(x) + beside


def test_a_path_beside_the_blocks_that_opens_is_found():
    torch.manual_seed(0)
    net = Beside().eval()
    watch = tracker.Watch(every_n_steps=1, probe=states(4), k=3, blocks=NAMES)
    watch(0, net)
    for step in range(1, 1 + TURNS):
        watch(step, net)
    net.gate.data.fill_(1.0)
    with pytest.warns(UserWarning, match="by another way than the block's first argument"):
        for step in range(1 + TURNS, 1 + 2 * TURNS):
            watch(step, net)
    (reason,) = watch.skipped.reasons.values()
    assert list(watch.skipped.reasons) == [2 * TURNS]
    named = ", ".join(map(str, range(1 + TURNS, 2 * TURNS)))
    assert f" Steps {named}, measured with fewer checks, may have this fault, too." in reason


def test_nothing_is_doubted_that_was_checked():
    """At the first measurement everything is checked, and at the second its values show the fault."""
    net = gated(lambda x: x.flip(0), 1)
    net[1].gate.data.zero_()
    watch = tracker.Watch(every_n_steps=1, probe=states(4), k=3, blocks=NAMES)
    watch(0, net)
    net[1].gate.data.fill_(1.0)
    with pytest.warns(UserWarning, match="mixes the samples") as caught:
        watch(1, net)
    assert "fewer checks" not in str(caught[0].message)


@pytest.mark.parametrize("opened", [0, 2])
def test_a_block_in_the_full_sequence_stays_there_alone(opened):
    """Values and their differences at single rows of equal tokens are those of the full sequence."""
    net = gated(lambda x: x.mean(1, keepdim=True), opened)
    x = states(4)[:, :1].expand(-1, 6, -1)
    for _, unit in watched(net, STEPS, x):
        assert list(json.loads(unit.attrs["fallbacks"])) == [str(opened + 1)]
