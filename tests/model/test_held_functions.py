"""Functions that modules keep run the copies' modules in a replica: no module of the caller's model runs."""

import functools
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, MethodType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tracker
from tests.support.central_differences import assert_measured_as_it_runs
from tests.support.kept_functions import INPUTS, Block, model_of, over_self
from tests.support.refused import refused
from tests.support.stacks import Stack
from tracker.blocks.find import find_blocks
from tracker.model.random_numbers import Generators
from tracker.model.replica import Replica
from tracker.model.twin import twin_of


class InSlot(nn.Module):
    __slots__ = ("mlp",)

    def __init__(self, mlp):
        super().__init__()
        object.__setattr__(self, "mlp", mlp)

    def forward(self, x):
        return self.mlp(x)


def recursive(block):
    def apply(x, times=2):
        return x if times == 0 else block.mlp(apply(x, times - 1))

    return apply


def decorated(block):
    @functools.wraps(block.mlp.forward)
    def apply(x):
        return block.mlp(x)

    apply.mlp = block.mlp
    return lambda x: apply(x) + apply.mlp(x)


def of_globals(block):
    """As in a notebook, where modules are global."""
    return FunctionType((lambda x: (lambda: mlp(x))()).__code__, {"mlp": block.mlp})  # type: ignore[name-defined]


def shared_variable(block):
    """One function sets, at every call, what the other one reads."""
    mlp = None

    def give(chosen):
        nonlocal mlp
        mlp = chosen

    def apply(x):
        give(block.mlp)
        y = mlp(x)
        give(None)
        return y

    return apply


KEPT = {
    "lambda over self": over_self,
    "default value": lambda block: lambda x, mlp=block.mlp: mlp(x),
    "keyword default": lambda block: lambda x, *, mlp=block.mlp: mlp(x),
    "closure over a list": lambda block: (lambda steps: lambda x: steps[0](steps[1](x)))(
        [block.mlp, block.norm]
    ),
    "partial": lambda block: functools.partial(block.mlp),
    "partial with keywords": lambda block: functools.partial(block.through_mlp, sign=-1.0),
    "method of self": lambda block: block.through_mlp,
    "method of no class": lambda block: MethodType(lambda mlp, x: 2 * mlp(x), block.mlp),
    "dictionary of partials": lambda block: {
        "f": functools.partial(lambda mlp, x: mlp(x), block.mlp)
    },
    "recursive": recursive,
    "decorated": decorated,
    "globals": of_globals,
    "shared variable": shared_variable,
    "weak reference": lambda block: (lambda mlp: lambda x: mlp()(x))(weakref.ref(block.mlp)),
    "proxy": lambda block: (lambda mlp: lambda x: mlp(x))(weakref.proxy(block.mlp)),
    "weak set": lambda block: (lambda mlps: lambda x: [*mlps][0](x))(weakref.WeakSet([block.mlp])),
    "key": lambda block: (lambda signs: lambda x: signs[block.mlp] * x)({block.mlp: -1.0}),
    "slot": lambda block: InSlot(block.mlp),
    "compiled": lambda block: torch.compile(lambda x: block.mlp(x), backend="eager"),
}


def measured(model):
    return tracker.measure(model, INPUTS.float(), k=2)


def refuse_to_run(model):
    """Let every module of the model fail when it runs."""
    for module in model.modules():
        module.register_forward_hook(lambda *_: pytest.fail("a module of the caller's model ran"))


@pytest.mark.parametrize("name", KEPT)
def test_functions_run_the_copies(name):
    model = model_of(KEPT[name])
    expected = assert_measured_as_it_runs(model.double().eval(), INPUTS, model.blocks)
    refuse_to_run(model)
    # In the measuring dtype and without dropout, as only the copies' weights are.
    options = dict(k=2, keep="jacobian", final_norm="exclude", dtype=torch.float64, tokens=[2])
    seen = tracker.measure(model.float().train(), INPUTS, **options, witness="off")
    np.testing.assert_allclose(seen.jacobian, expected.jacobian, atol=1e-12)


class Net(Stack):
    """A model that reaches its blocks through what it keeps."""

    def __init__(self, keep):
        super().__init__([Block() for _ in range(2)])
        self.steps = keep(self)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


class Outer(nn.Module):
    def __init__(self, as_forward):
        super().__init__()
        self.net = model_of()
        if as_forward:
            self.forward = self.net.forward
        else:
            self.run = self.net.forward

    def forward(self, x):
        return self.run(x)


MODELS = {
    "partials": lambda: Net(lambda net: [functools.partial(block) for block in net.blocks]),
    "methods": lambda: Net(lambda net: [block.forward for block in net.blocks]),
    "calls": lambda: Net(lambda net: [block.__call__ for block in net.blocks]),
    "modules": lambda: Net(lambda net: list(net.blocks)),
    "method": lambda: Outer(as_forward=False),
    "forward": lambda: Outer(as_forward=True),
}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "methods"])
def test_blocks_are_reached_through_functions(name):
    model = MODELS[name]().double().eval()
    blocks = [model.get_submodule(block) for block in find_blocks(model).names]
    assert len(blocks) == 2
    assert_measured_as_it_runs(model, INPUTS, blocks)


def test_blocks_whose_forward_alone_is_called_are_not_reached():
    with refused("never reached 2 of the blocks"):
        measured(MODELS["methods"]().eval())


class Past(Block):
    """It reaches a module of the model, or what belongs to it, by its class, of which there is no copy."""

    reached = {}

    def forward(self, x):
        key = "first" if "first" in self.reached else self
        return x + self.reached[key](x)


@pytest.mark.parametrize("what", ["blocks.0.mlp of the model itself", "what belongs to a module"])
def test_what_reaches_modules_past_their_copies_is_refused(what):
    model = Stack([Past(KEPT["recursive"]) for _ in range(2)])
    Past.reached = {block: torch.sin for block in model.blocks}
    if "mlp" in what:
        Past.reached["first"] = model.blocks[0].mlp
    with refused(f"can't run on copies: code reaches {what}"):
        measured(model)


def test_a_model_runs_and_learns_in_another_thread_while_its_twin_runs():
    model, x = model_of().eval(), INPUTS.float()

    def learn(_=None):
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected, y = learn(), model(x).detach()
    with ThreadPoolExecutor() as other, twin_of(model, Generators(x.device)) as twin:
        before = [(dict(vars(part)), part.training) for part in model.modules()]
        # Within a pass of the twin
        twin.blocks[1].register_forward_hook(lambda *_: gradients.extend(other.map(learn, [0])))
        gradients = []
        torch.testing.assert_close(twin(x), y)
        assert before == [(dict(vars(part)), part.training) for part in model.modules()]
    torch.testing.assert_close(gradients, [expected])


def test_functions_without_modules_stay_the_same_objects():
    plain = [F.gelu, F.silu, lambda x: 2 * x, str.upper, "text".upper]
    model = model_of()
    model.plain = plain
    replica = Replica(model, find_blocks(model), torch.float64, torch.device("cpu"))
    assert all(new is old for new, old in zip(replica.module.plain, plain, strict=True))
    kept = replica.module.blocks[0].kept
    assert kept is not model.blocks[0].kept and kept.__name__ == "<lambda>"
    assert kept.__closure__[0].cell_contents is replica.module.blocks[0]


def as_function(linear):
    original = linear.forward
    return lambda x: 2 * original(x)


def as_method(linear):
    return MethodType(lambda self, x: 2 * F.linear(x, self.weight, self.bias), linear)


@pytest.mark.parametrize("replace", [as_function, as_method])
def test_a_forward_replaced_on_the_instance_is_measured(replace):
    model = model_of().double().eval()
    qkv = model.blocks[0].attention.qkv
    qkv.forward = replace(qkv)
    assert_measured_as_it_runs(model, INPUTS, model.blocks)


def test_a_forward_replaced_by_an_object_is_refused():
    class Twice:
        def __init__(self, linear):
            self.linear = linear

        def __call__(self, x):
            return 2 * x

    model = model_of()
    model.blocks[0].attention.qkv.forward = Twice(model.blocks[0].attention.qkv)
    with refused("forward of Linear was replaced on the instance"):
        measured(model)


def test_a_replaced_forward_that_accelerate_wraps_is_measured():
    from accelerate import cpu_offload

    model = model_of().eval()
    qkv = model.blocks[0].attention.qkv
    qkv.forward = as_method(qkv)
    expected = measured(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    np.testing.assert_array_equal(measured(model).miscoupling, expected.miscoupling)
