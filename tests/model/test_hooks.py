"""Hooks that compute part of a model's function run in a replica; the caller's hooks that record are not disturbed."""

import functools
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import nn

import tracker
from tests.central_differences import assert_measured_as_it_runs
from tests.jacobians.test_rows import Stack
from tests.model.test_held_functions import INPUTS, KEPT, Block

D = INPUTS.shape[-1]


class Adapted(Stack):
    """A model whose hooks are part of its function: positions before some modules, adapters after."""

    def __init__(self, register):
        torch.manual_seed(0)
        super().__init__([Block(KEPT["lambda over self"]) for _ in range(2)])
        self.adapter = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.positions = nn.Parameter(torch.randn(1, 9, D))
        register(self, *self.blocks)
        self.double().eval()

    def add_positions(self, module, arguments):
        return arguments[0] + self.positions[:, : arguments[0].shape[1]], *arguments[1:]

    def adapt(self, module, arguments, output):
        return output + self.adapter(output)

    def shift(self, module, arguments, keywords):
        return (arguments[0] + self.positions[0, 0],), keywords


def positions_before_the_first(model, first, second):
    first.register_forward_pre_hook(model.add_positions)


def positions_before_every_block(model, first, second):
    for block in (first, second):
        block.register_forward_pre_hook(model.add_positions)


def positions_inside(model, first, second):
    second.attention.register_forward_pre_hook(model.add_positions)


def a_method_with_keywords(model, first, second):
    second.register_forward_pre_hook(model.shift, with_kwargs=True)


def an_adapter_after_a_block(model, first, second):
    first.register_forward_hook(lambda module, arguments, output: output + model.adapter(output))


def an_adapter_inside(model, first, second):
    second.mlp.register_forward_hook(model.adapt)


def a_partial(model, first, second):
    def adapt(adapter, module, arguments, output):
        return output + adapter(output)

    second.register_forward_hook(functools.partial(adapt, model.adapter))


def a_hook_over_its_own_module(model, first, second):
    first.attention.adapter = nn.Linear(D, D)
    first.attention.register_forward_hook(lambda module, arguments, output: module.adapter(output))


def a_module_as_hook(model, first, second):
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, module, arguments, output):
            return output + self.linear(output)

    model.hook = Adapter()
    first.register_forward_hook(model.hook)


def a_tensor(model, first, second):
    direction = torch.randn(D, dtype=torch.float64)
    first.register_forward_hook(
        lambda module, arguments, output: output + (output @ direction)[..., None] * direction
    )


def two_in_order(model, first, second):
    first.register_forward_hook(model.adapt)
    first.register_forward_hook(lambda module, arguments, output: output * model.positions[0, 0])
    first.register_forward_hook(
        lambda module, arguments, output: output + model.positions[0, 1], prepend=True
    )


REGISTER = [
    positions_before_the_first,
    positions_before_every_block,
    positions_inside,
    a_method_with_keywords,
    an_adapter_after_a_block,
    an_adapter_inside,
    a_partial,
    a_hook_over_its_own_module,
    a_module_as_hook,
    a_tensor,
    two_in_order,
]


@pytest.mark.parametrize("register", REGISTER)
def test_hooks_of_the_model_are_measured(register):
    model = Adapted(register)
    hooks = [
        list(m._forward_hooks.values()) + list(m._forward_pre_hooks.values())
        for m in model.modules()
    ]
    assert_measured_as_it_runs(model, INPUTS, model.blocks)
    assert hooks == [
        list(m._forward_hooks.values()) + list(m._forward_pre_hooks.values())
        for m in model.modules()
    ]


def test_hooks_of_the_model_run_with_weights_in_the_measuring_dtype():
    """In training mode and float32; the caller's modules do not run."""
    model = Adapted(an_adapter_inside)
    expected = tracker.measure(model, INPUTS, k=2, dtype=torch.float64)
    for module in model.modules():
        module.register_forward_hook(lambda *_: pytest.fail("a module of the caller's model ran"))
    seen = tracker.measure(model.float().train(), INPUTS, k=2, dtype=torch.float64, witness="off")
    np.testing.assert_allclose(seen.norm, expected.norm, rtol=1e-12)


class Recorder:
    """As loggers, profilers and summaries have it."""

    def __init__(self):
        self.fired = 0

    def record(self, module, arguments, output):
        self.fired += 1
        return output


class Recording(Stack):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__([Block(KEPT["lambda over self"]) for _ in range(2)])
        self.seen, self.values = [], None
        self.blocks[0].register_forward_hook(self.record)
        self.eval()

    def record(self, module, arguments, output):
        self.values = output.numpy()  # fails under torch.func
        self.seen.append(module)


def test_hooks_that_record_do_not_run():
    model, plain, states, recorder = Recording(), Recording(), [], Recorder()
    plain.blocks[0]._forward_hooks.clear()
    model.blocks[1].register_forward_hook(lambda module, arguments, output: states.append(output))
    model.blocks[1].register_forward_hook(recorder.record)
    model.blocks[1].register_full_backward_hook(lambda *_: pytest.fail("a gradient hook ran"))
    model.register_forward_hook(lambda module, arguments, output: states.append(module.training))
    seen, expected = (tracker.measure(m, INPUTS.float(), k=2) for m in (model, plain))
    assert (seen.miscoupling == expected.miscoupling).all()
    assert states == [] and recorder.fired == 0 and model.seen == [] and model.values is None


def test_a_list_to_which_a_hook_of_the_model_appends_is_not_the_callers():
    seen = []

    def register(model, first, second):
        first.register_forward_hook(
            lambda module, arguments, output: seen.append(output) or model.adapter(output)
        )

    tracker.measure(Adapted(register), INPUTS, k=2, dtype=torch.float64)
    assert seen == []


def test_a_hook_whose_code_names_no_weights_is_not_taken_for_one():
    """It reads an attribute that is called as a tensor of its script."""
    scope = {"data": torch.ones(2), "seen": []}
    model = Adapted(lambda *_: None)
    hook = FunctionType(
        (lambda module, arguments, output: seen.append(output.data)).__code__, scope
    )  # type: ignore[name-defined]
    model.blocks[0].register_forward_hook(hook)
    tracker.measure(model, INPUTS, k=2, dtype=torch.float64, witness="off")
    assert scope["seen"] == []
