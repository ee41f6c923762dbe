"""Hooks that compute part of a model's function run in a replica; the caller's hooks that record are not disturbed."""

import builtins
import copy
import functools
import threading
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
import wandb
from ray.experimental.tqdm_ray import safe_print
from torch import nn

import tracker
from tests.support.central_differences import assert_measured_as_it_runs
from tests.support.kept_functions import INPUTS, Block
from tests.support.stacks import Stack

D = INPUTS.shape[-1]


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, module, arguments, output):
        return output + self.linear(output)


class Adapted(Stack):
    """A model whose hooks are part of its function: positions before some modules, adapters after."""

    def __init__(self, register):
        torch.manual_seed(0)
        super().__init__([Block() for _ in range(2)])
        self.adapter = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.hook = Adapter()
        self.positions = nn.Parameter(torch.randn(1, 9, D))
        register(self, *self.blocks)
        self.double().eval()

    def add_positions(self, module, arguments):
        return arguments[0] + self.positions[:, : arguments[0].shape[1]], *arguments[1:]

    def adapt(self, module, arguments, output):
        return output + self.adapter(output)

    def shift(self, module, arguments, keywords):
        return (arguments[0] + self.positions[0, 0],), keywords


def a_hook_over_its_own_module(model, first, second):
    first.attention.adapter = nn.Linear(D, D)
    first.attention.register_forward_hook(lambda module, arguments, output: module.adapter(output))


def two_in_order(model, first, second):
    first.register_forward_hook(model.adapt)
    first.register_forward_hook(lambda module, arguments, output: output * model.positions[0, 0])
    first.register_forward_hook(
        lambda module, arguments, output: output + model.positions[0, 1], prepend=True
    )


class Steering:
    def __init__(self):
        self.direction = torch.randn(D, dtype=torch.float64)

    def __call__(self, module, arguments, output):
        return output + (output @ self.direction)[..., None] * self.direction


def after_the_mlp(make):
    def register(model, first, second):
        second.mlp.register_forward_hook(make(model))

    return register


def in_place(module, arguments, output):
    output.mul_(2)


def of_a_part(module, arguments, output):
    part = output[0]
    part[:, 0] = 2 * part[:, 1]


def augmented(module, arguments, output):
    output[..., 0] += output[..., 1]


def of_torch(module, arguments, output):
    F.relu_(output)


def of_all(module, arguments, output):
    for sample in [output]:
        through_a_function(sample)


def through_a_function(states):
    states.add_(states.roll(1, -1))


def at_times(module, arguments, output):
    if module.training:
        return None
    return 1.5 * output


COMPUTE = {
    "positions before the first": lambda model, first, second: first.register_forward_pre_hook(
        model.add_positions
    ),
    "a method with keywords": lambda model, first, second: second.register_forward_pre_hook(
        model.shift, with_kwargs=True
    ),
    "an adapter inside": after_the_mlp(lambda model: model.adapt),
    "over its own module": a_hook_over_its_own_module,
    "two in order": two_in_order,
    "a partial": after_the_mlp(lambda model: functools.partial(Adapter.forward, model.hook)),
    "an object": after_the_mlp(lambda model: Steering()),
    "in place": after_the_mlp(lambda model: in_place),
    "of a part": after_the_mlp(lambda model: of_a_part),
    "augmented": after_the_mlp(lambda model: augmented),
    "of torch": after_the_mlp(lambda model: of_torch),
    "of all": after_the_mlp(lambda model: of_all),
    "at times": after_the_mlp(lambda model: at_times),
    "and appends": after_the_mlp(lambda model: lambda m, a, y: SEEN.append(y) or model.adapter(y)),
}


@pytest.mark.parametrize("name", COMPUTE)
def test_hooks_that_compute_are_measured(name):
    model = Adapted(COMPUTE[name])
    assert_measured_as_it_runs(model, INPUTS, model.blocks)


SEEN, STATISTICS, CALLS = [], defaultdict(list), 0


class Recorder:
    """As loggers, profilers and summaries have it."""

    def __init__(self):
        self.fired, self.mean, self.lock = 0, torch.zeros(D), threading.Lock()

    def record(self, module, arguments, output):
        self.fired += 1
        self.mean.lerp_(output.detach().mean((0, 1)), 0.1)
        return output

    def __call__(self, module, arguments, output):
        with self.lock:
            self.write(output.numpy())  # fails under torch.func

    def write(self, values):
        STATISTICS["written"].append(values)


class Recording(Stack):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__([Block() for _ in range(2)])
        self.seen, self.values = [], None
        self.eval()

    def record(self, module, arguments, output):
        self.values = output.numpy()
        self.seen.append(module)


def count(*_):
    global CALLS
    CALLS += 1


def in_a_variable():
    last = None

    def record(module, arguments, output):
        nonlocal last
        last = output.numpy()
        SEEN.append(last)

    return record


def summarize(module, arguments, output):
    total = 0.0
    for sample in output:
        total += float(sample.mean())
    STATISTICS["mean"] = total
    module.last = total


RECORD = {
    "a list": lambda model: lambda m, a, y: SEEN.append(float(y.mean())),
    "a dictionary": lambda model: lambda m, a, y: STATISTICS[m].append(y.numpy()),
    "a global": lambda model: count,
    "a variable": lambda model: in_a_variable(),
    "sums": lambda model: summarize,
    "an object": lambda model: Recorder().record,
    "a called object": lambda model: Recorder(),
    "the model": lambda model: model.record,
    "a writer": lambda model: functools.partial(lambda r, m, a, y: r.write(y.item()), Recorder()),
    "wandb": lambda model: lambda m, a, y: wandb.log({"mean": y.mean()}),
    "print": lambda model: lambda m, a, y: print(y.mean()),
}


@pytest.fixture(scope="module")
def plain():
    return tracker.measure(Recording(), INPUTS.float(), k=2)


@pytest.mark.parametrize("name", RECORD)
def test_hooks_that_record_are_silent(name, plain, monkeypatch):
    model = Recording()
    monkeypatch.setattr(wandb, "log", lambda row: SEEN.append(row))
    monkeypatch.setattr(builtins, "print", safe_print)  # as Ray does
    hook = RECORD[name](model)
    model.blocks[1].attention.register_forward_hook(hook)
    model.blocks[1].register_full_backward_hook(lambda *_: pytest.fail("a gradient hook ran"))
    recorder = getattr(hook, "__self__", hook)
    held = (model, model.blocks[1].attention, recorder)

    def recorded():
        attributes = [dict(vars(holder)) for holder in held]
        return copy.copy(SEEN), dict(STATISTICS), CALLS, len(model.seen), attributes

    before = recorded()
    seen = tracker.measure(model, INPUTS.float(), k=2)
    assert (seen.miscoupling == plain.miscoupling).all()
    assert str(recorded()) == str(before)


FEATURES = []


def an_attribute(block):
    def leave(module, arguments, output):
        block.feature = output.sin()

    return leave, lambda x: block.mlp(x) * block.feature


def an_entry(block):
    return lambda m, a, y: FEATURES.append(y.sin()), lambda x: block.mlp(x) * block.features.pop()


@pytest.mark.parametrize("make", [an_attribute, an_entry])
def test_what_hooks_leave_for_a_later_module_is_measured(make):
    model = Adapted(lambda *_: None)
    for block in model.blocks:
        hook, block.kept = make(block)
        block.features = FEATURES
        block.attention.register_forward_hook(hook)
    assert_measured_as_it_runs(model, INPUTS, model.blocks)
