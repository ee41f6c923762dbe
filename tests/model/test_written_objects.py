"""A training is bit-identical with measurements, whatever its forward passes write to, or a warning names what that is."""

# ruff: noqa: F401 (what is imported is used in the texts of the table)

import ctypes
import io
import warnings
from collections import Counter, deque
from itertools import count
from threading import Lock
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch

import tracker
from tests.support.draws import normal
from tests.support.home_made import WIDTH, Flat
from tests.support.stacks import Stack

PROBE = normal(2, 4, WIDTH)


class Counting(Flat):
    """Counts its positive outputs, in what it holds or elsewhere; the loop shifts its outputs by the count."""

    number = 0

    def __init__(self, held, write):
        super().__init__()
        self.held, self.write, self.shift = held(self), write, 0.0

    def forward(self, x):
        y = super().forward(x)
        self.write(self, int((y > 0).sum()))
        return y + self.shift


class Slots:
    __slots__ = ("number",)
    number: int

    def __call__(self, k):
        self.number = k + getattr(self, "number", 0)


def adder(total=0):
    def add(k=0):
        nonlocal total
        total += k
        return total

    return add


class Frozen(dict):
    def __setitem__(self, *_):
        raise TypeError


def unset():
    def read():
        return 0 if True else value

    if False:
        value = 0
    return read


# What a block holds, what its forward pass does with a number k, and what the loop reads
COPIED = {
    "array": ("np.zeros(1)", "block.held[0] += k", "block.held[0]"),
    "called object with slots": ("Slots()", "block.held(k)", "block.held.number"),
    "meter of a module": (
        "SimpleNamespace(module=block, number=0)",
        "block.held.number += k * (block is block.held.module)",
        "block.held.number",
    ),
    "counter with a lock": (
        "SimpleNamespace(lock=Lock(), number=0)",
        "block.held.lock.acquire(); block.held.number += k; block.held.lock.release()",
        "block.held.number",
    ),
    "iterator": ("iter(range(999))", "next(block.held)", "block.held.__length_hint__()"),
    "itertools.count": ("count()", "next(block.held)", "int(repr(block.held)[6:-1])"),
    "deque of arrays": ("deque([np.zeros(1)])", "block.held[0][0] += k", "block.held[0][0]"),
    "frame": ("pandas.DataFrame({'a': [0]})", "block.held['a'] += k", "block.held['a'][0]"),
    "function with a variable": ("adder()", "block.held(k)", "block.held()"),
    "function over a list and a tensor": (
        "lambda k, seen=[], sums=torch.zeros(1): seen.append(k) or sums.add_(k)",
        "block.held(k)",
        "len(block.held.__defaults__[0]) + float(block.held.__defaults__[1])",
    ),
    "ctypes array": ("(ctypes.c_int * 1)()", "block.held[0] += k", "block.held[0]"),
    "text stream": ("io.StringIO()", "block.held.write('a' * k)", "block.held.tell()"),
    "counter in a configuration": (
        "SimpleNamespace(seen=Counter())",
        "block.held.seen.update(a=k)",
        "block.held.seen['a']",
    ),
    "nested cache": (
        "{'a': [torch.zeros(8), deque([[0]])]}",
        "block.held['a'][0].add_(k); block.held['a'][1][0].append(k)",
        "float(block.held['a'][0][0]) + len(block.held['a'][1][0])",
    ),
}
# And what the warning names
NAMED = {
    "generator": (
        "(i for i in count())",
        "next(block.held)",
        "block.held.gi_frame.f_locals.get('i', 0)",
        "model.blocks.0.held (generator), model.blocks.1.held (generator)",
    ),
    "class attribute": ("0", "Counting.number += k", "Counting.number", "number of Counting (int)"),
    "global": ("0", "global total; total += k", "total", "model.blocks.0.write: total of write"),
    "global array": ("0", "array[0] += k", "array[0]", "array of write (ndarray)"),
    "variable of a function": ("0", "add(k)", "add()", "total of adder.<locals>.add (int)"),
}
# Of what the scope below has: it is only read
READ = {
    "two functions of one factory": "add(), five()",
    "variable without a value": "empty()",
    "dictionary that can't be copied": "frozen[0]",
    "list in itself": "cycle[0]",
    "not a number": "nan > 0",
    "lock": "locks[0].locked()",
    "table": "table['a'][0]",
    "object in levels": "trainer.state",
}
SCOPE = {
    "five": adder(5),
    "empty": unset(),
    "frozen": Frozen({0: [0]}),
    "cycle": (cycle := [0]),
    "nan": float("nan"),
    "locks": [Lock()],
    "table": pandas.DataFrame({"a": [0]}),
    "trainer": SimpleNamespace(state=SimpleNamespace(of=SimpleNamespace(of=SimpleNamespace(n=0)))),
}
cycle.append(cycle)


def train(held, write, read, watch=None):
    """Return what each step of a small training reads, and its losses."""
    scope = {**globals(), **SCOPE, "total": 0, "array": np.zeros(1), "add": adder()}
    exec(f"def write(block, k): {write}", scope)
    Counting.number = 0
    torch.manual_seed(0)
    blocks = [Counting(eval(f"lambda block: {held}", scope), scope["write"]) for _ in range(2)]
    model, seen = Stack(blocks), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        if watch is not None:
            watch(step, model)
        loss = model(PROBE + step).square().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        for block in blocks:
            seen.append((read_of := float(eval(read, scope, {"block": block})), loss.item()))
            block.shift = read_of % 7 / 100
    return seen


@pytest.mark.parametrize("name", READ)
def test_what_is_only_read_is_not_named(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train("0", READ[name], "0", tracker.Watch(1, probe=PROBE, k=2, max_overhead=None))


@pytest.mark.parametrize("name", [*COPIED, *NAMED])
def test_a_training_with_measurements_is_the_same_or_a_warning_says_why_not(name):
    held, write, read, *named = (COPIED | NAMED)[name]
    expected = train(held, write, read)
    assert expected[0][0] != expected[-1][0], "it counts"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        seen = train(held, write, read, tracker.Watch(1, probe=PROBE, k=2))
    about = [str(w.message) for w in caught if "forward pass writes to" in str(w.message)]
    assert [named[0] in text for text in about] == [True for _ in named], about
    assert (seen == expected) == (not named)
