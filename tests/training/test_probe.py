"""Batches of the types that loaders yield: how they are held, what `forward=` receives, and what a checkpoint gives back."""

import io
import threading
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import BatchEncoding

import tracker
from tests.support.draws import normal
from tests.support.lightning_runs import Classifier, EncoderModule, trainer
from tests.support.models import neox, tokens
from tests.support.refused import refused
from tests.support.units import assert_same_units
from tests.support.watch import Watch
from tracker.provenance import digest
from tracker.training.probe import copied, first_samples, resolve, sample_count

Pair = namedtuple("Pair", "x y")


class Kind(Enum):
    TEXT = "text"


@dataclass
class Record:
    x: torch.Tensor
    meta: Any = None


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    sizes: list[int] = field(default_factory=lambda: [3, 4])


@attrs.frozen
class Attrs:
    x: torch.Tensor
    other: Any = None


class Plain:
    """An object that Lightning moves with its `.to`."""

    def __init__(self, x: torch.Tensor, lock: Any = None):
        self.x, self.lock = x, lock

    def to(self, *args, **kwargs):
        return Plain(self.x.to(*args, **kwargs), self.lock)


class Kept(torch.Tensor):
    """A tensor whose slices and copies are of its class."""


X = normal(4, 6, 8, seed=2)
# Each with the form in which it is held
BATCHES = {
    "NamedTuple": (Pair(X, torch.arange(4)), (X, torch.arange(4))),
    "BatchEncoding": (BatchEncoding({"x": X}), {"x": X}),
    "dataclass": (Record(X, {"pair": [Pair(X, "a")]}), {"x": X, "meta": {"pair": [(X, "a")]}}),
    "attrs": (Attrs(X, Slotted(X + 1)), {"x": X, "other": {"x": X + 1, "sizes": [3, 4]}}),
    "object with .to": (Plain(X, threading.Lock()), {"x": X, "lock": None}),
    "SimpleNamespace": (SimpleNamespace(x=X, o=object()), {"x": X, "o": None}),
    "arrays": (
        {"x": X.numpy()[::-1], "n": np.float64(2.5), "names": np.array(["a", "bc"])},
        {"x": X.flip(0), "n": 2.5, "names": None},
    ),
    "of torch": ({"x": X, "dtype": X.dtype, "kind": Kind.TEXT}, {"x": X, "dtype": None, "kind": "TEXT"}),
    "tensor of another class": ({"x": X.as_subclass(Kept)}, {"x": X}),
    "keys of other types": ({"x": X, (1, 2): 3}, {"x": X, "(1, 2)": 3}),
    "texts": ({"text": ["a", "b", "c", "d"], "x": X}, {"text": ["a", "b", "c", "d"], "x": X}),
}  # fmt: skip


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_is_held_in_a_form_that_a_checkpoint_gives_back(case):
    batch, expected = BATCHES[case]
    held = copied(batch)
    assert repr(held) == repr(expected)
    assert digest(held) == digest(expected) != digest(copied({"x": X + 1}))
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    assert repr(torch.load(file, weights_only=True)) == repr(held)


def test_samples_of_a_batch():
    """Tensors and lists of texts that are as long as the batch are cut; the copy shares no memory with it."""
    batch = {
        "classes": ["cat", "dog", "eel"],
        "scale": torch.tensor(2.0),
        "x": X,
        "nested": [torch.arange(4), torch.arange(3)],
        "texts": ["a", "b", "c", "d"],
    }
    first = copied(batch, slice(2))
    cut = {"x": X[:2], "nested": [torch.arange(2), torch.arange(3)], "texts": ["a", "b"]}
    assert repr(first) == repr(batch | cut)
    assert first["x"].data_ptr() != X.data_ptr()
    assert first["x"].untyped_storage().size() == 2 * 48 * 4
    assert sample_count(first_samples(torch.zeros(9, 2))) == 8
    assert sample_count(["a", "b"]) == 2


def test_which_probe_is_measured():
    def never():
        raise AssertionError("the loader is not asked")

    held = copied({"x": X})
    assert repr(resolve(None, None, lambda: {"x": X})) == repr(held)
    assert resolve(None, held, never) is held
    assert repr(resolve(Record(X), None, never)) == repr({"x": X, "meta": None})
    assert repr(resolve(UserDict(x=X), held, never)) == repr(held)
    message = "{x: float32 .4, 6, 8.}, is not that .* {x: float32 .4, 6, 8.}: the checkpoint's is"
    with pytest.warns(UserWarning, match=message):
        assert resolve({"x": X + 1}, held, never) is held


# Runs.


class Batched(EncoderModule):
    """A module whose batches have a part x."""

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        return self.model(batch.x).square().mean()


def loader(make):
    rows = torch.utils.data.TensorDataset(X)
    return torch.utils.data.DataLoader(
        rows, 2, collate_fn=lambda rows: make(torch.stack([row[0] for row in rows]))
    )


def named(module, batch):
    assert batch.x is batch["x"] and batch.meta.y == batch.meta["y"] == 1
    return module(batch.x)


def indexed(module, batch):
    x, _ = batch
    return module(x)


FORWARDS = {
    "parts with names": (lambda x: Record(x, {"y": 1}), named),
    "tuple": (lambda x: Pair(x, torch.zeros(len(x))), indexed),
    "by the signature": (lambda x: Record(x, {"lock": threading.Lock()}), None),
    "object with .to": (lambda x: Plain(x, object()), None),
}


@pytest.mark.parametrize("case", FORWARDS)
def test_what_a_loader_yields_is_measured(case):
    make, forward = FORWARDS[case]
    watch, module = Watch(2, probe=None, forward=forward), Batched()
    trainer([watch], max_steps=2).fit(module, loader(make))
    expected = tracker.measure(module.model, X[:2], k=2).assign_coords(step=2)
    assert_same_units(watch.units[2], expected)


def test_a_part_that_forward_does_not_find():
    def forward(module, batch):
        return module(batch.ids)

    with refused("has no part 'ids', but x, meta. It takes .*batch.x"):
        tracker.Watch(1, probe=Record(X), forward=forward)(0, Classifier())


@pytest.mark.slow
def test_a_resumed_run_measures_the_same_inputs(tmp_path):
    """Lightning reads checkpoints with `weights_only=True`."""

    def train(max_steps, **options):
        watch = Watch(2, probe=None, save_dir=tmp_path / "store")
        runner = trainer([watch], max_steps=max_steps, keep=tmp_path)
        runner.fit(Batched(), loader(lambda x: Record(x + max_steps, Kind.TEXT)), **options)
        return watch

    first, second = train(2), train(4, ckpt_path=tmp_path / "step=2.ckpt")
    assert list(second.units) == [4]
    assert repr(second.probe) == repr(first.probe)
    assert second.units[4].attrs["inputs_sha256"] == first.units[2].attrs["inputs_sha256"]


def test_mappings_that_are_no_dictionaries():
    model, ids = neox(), tokens()
    expected = tracker.measure(model, {"input_ids": ids}, k=2)
    for inputs in (
        UserDict(input_ids=ids),
        BatchEncoding({"input_ids": ids, "offsets": np.zeros(3)}),
    ):
        np.testing.assert_array_equal(
            tracker.measure(model, inputs, k=2)["miscoupling"], expected["miscoupling"]
        )
    with refused("does not take these inputs.*'y'.*forward=lambda"):
        tracker.measure(Classifier(), UserDict(x=X, y=X), k=2)
