"""The caller's own model is asked about its blocks: sound models agree, as those of tests/zoo do."""

import pytest
import torch
from torch import Tensor, nn

import tracker
from tests.support.asked import IDS, Block, D, Mixing, Model, WithGates
from tests.support.models import build
from tests.support.refused import refused
from tracker.jacobians.witness import Witness

OTHER_WAY = "is not the derivative of what the model computes there"


class Unsteady(Block):
    """A rounding of the state changes its gradient by about a percent, as in the backward pass of a saturated softmax."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(D))

    def f(self, x: Tensor) -> Tensor:
        # The last two are equal but for rounding
        return super().f(x) + 3e5 * x * self.w - x * (3e5 * self.w)


@pytest.mark.parametrize(
    "block, error, found",
    [(Block, 0.02, "refused"), (Unsteady, 0.0, "told"), (Unsteady, 0.02, "refused")],
)
def test_an_error_that_rounding_explains_is_told_and_a_larger_one_refused(
    block, error, found, monkeypatch
):
    products = Witness.products
    planted = lambda self, call, rows, J: products(self, call, rows, (1 + error) * J)  # noqa: E731
    monkeypatch.setattr(Witness, "products", planted)
    model = Model(block).eval()
    if found == "refused":
        with refused(OTHER_WAY):
            tracker.measure(model, IDS, k=4)
    else:
        assert (
            "in 3 blocks J^T u differs by up to"
            in tracker.measure(model, IDS, k=4).attrs["witness"]
        )


def at_one_token(y):
    y = y.clone()
    y[:, 2] *= 1.5
    return y


OF_SOME = {
    "at a token that is not measured": at_one_token,
    "in batches": lambda y: 1.5 * y if len(y) > 1 else y,
    "of few tokens": lambda y: torch.where(
        y[..., :1] > y[..., :1].flatten().kthvalue(2).values, y, 1.5 * y
    ),
}


@pytest.mark.parametrize("where", OF_SOME)
def test_a_copy_that_differs_is_refused_at_all_tokens_and_with_two_samples(where, monkeypatch):
    """It lacks a hook; the token that is measured is the last one."""

    def remove_hooks(replica, *_):
        replica.blocks[0]._forward_hooks.clear()

    monkeypatch.setattr("tracker.model.replica.adjust_configs", remove_hooks)
    model = Model().eval()
    model.blocks[0].register_forward_hook(lambda module, args, y: OF_SOME[where](y))
    with refused(r"block 1 \(blocks.0\): from the same state, the model computes another output"):
        tracker.measure(model, IDS, k=4)


class ShiftedGate(WithGates):
    """Block 1 alone is given a gate, which at each token depends on the token before: it is no part of J of one token."""

    def step(self, l: int, x: Tensor) -> Tensor:
        before = nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        return self.blocks[l](
            x, torch.ones_like(x) if l else (4 * self.outside[l](before)).sigmoid()
        )


class Looped(Model):
    def __init__(self):
        super().__init__(depth=1)
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)
        self.outside = self.outside[:1]


SOUND = {
    "a first state mixed in": Mixing,
    "a gate from the token before": ShiftedGate,
    "one module three times": Looped,
}


@pytest.mark.parametrize("name", SOUND)
def test_models_that_look_as_if_the_state_went_another_way_agree(name):
    ds = tracker.measure(SOUND[name]().eval(), IDS, k=4)
    assert ds.attrs["witness"].startswith("agrees at one row of each block"), ds.attrs["witness"]


def test_the_copy_answers_where_the_caller_says_so():
    model = Model()
    model.register_forward_hook(pytest.fail)
    attribute = tracker.measure(model, IDS, k=4, witness="off").attrs["witness"]
    assert attribute.startswith("not asked: the caller turned it off; its copy agrees")


def test_the_copy_answers_for_a_model_that_cannot_run():
    """Float64 weights, which transformers' grouped experts refuse."""
    model, inputs = build("mixtral")
    attribute = tracker.measure(model.double(), inputs, k=4, dtype="float64").attrs["witness"]
    assert (
        attribute.startswith("not asked: RuntimeError: ")
        and "; its copy agrees at one row of each block" in attribute
    )
