"""Batches of the types that loaders yield: what `forward=` receives, and what a checkpoint gives back."""

import io
import threading
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import SimpleNamespace
from typing import Any

import attrs
import lightning
import numpy as np
import pytest
import tokenizers
import torch
from torchvision.tv_tensors import Image
from transformers import (
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import BaseModelOutput

import tracker
from tests.lightning_runs import Classifier, trainer
from tests.models import neox, tokens
from tests.training.test_callback import Watch, assert_same_units
from tracker.common.errors import UsageError
from tracker.provenance import digest
from tracker.training.probe import (
    as_first,
    contents,
    cpu_copy,
    first_samples,
    in_form_of,
    inputs_digest,
    map_leaves,
    sample_count,
)

Pair = namedtuple("Pair", "x y")


class Kind(Enum):
    TEXT = "text"
    IMAGE = "image"


class TextKind(StrEnum):
    TEXT = "text"


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    meta: Any = None


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


class AttributeDict(dict):
    """A dictionary whose entries are its attributes."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2))
BATCHES = {
    "NamedTuple": Pair(X, torch.arange(4)),
    "BatchEncoding": BatchEncoding({"x": X, "y": torch.arange(4)}),
    "UserDict": UserDict(x=X),
    "ModelOutput": BaseModelOutput(last_hidden_state=X),
    "frozen dataclass": Frozen(X, {"nested": Pair(X.half(), "text")}),
    "dataclass with slots": Slotted(X),
    "attrs": Attrs(X, [Slotted(X + 1)]),
    "object with .to": Plain(X),
    "SimpleNamespace": SimpleNamespace(x=X, sizes=np.arange(8).reshape(4, 2)),
    "dictionary with attributes": AttributeDict(x=X),
    "OrderedDict": OrderedDict(b=X, a=1),
    "arrays": {
        "x": X,
        "n": np.float64(2.5),
        "names": np.array(["a", "bc"]),
        "when": np.array(["2026-01-01"], "M8[D]"),
    },
    "enumerations": {"x": X, "kind": Kind.TEXT, "text": TextKind.TEXT},
    "torch's own": {"x": X, "dtype": X.dtype, "device": X.device, "shape": X.shape, "complex": 1j},
    "tensor of another class": {"image": Image(X)},
    "keys of other types": {"x": X, "pairs": {(1, 2): 3, Kind.TEXT: "a"}},
    "texts": {"text": ["a", "b", "c", "d"], "x": X},
}


def assert_same(a: Any, b: Any):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif (state := object.__getstate__(a)) and not isinstance(a, Enum):
        assert_same(state, object.__getstate__(b))
    else:
        assert a == b


def through_a_checkpoint(batch: Any) -> Any:
    file = io.BytesIO()
    torch.save({"probe": contents(batch)}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["probe"]


def another(batch: Any) -> Any:
    """Return a batch of the same form with other values."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return (leaf + 1).as_subclass(type(leaf))
        return (
            leaf[:1]
            if isinstance(leaf, list) or (isinstance(leaf, np.ndarray) and leaf.ndim)
            else leaf
        )

    return map_leaves(batch, change)


@pytest.mark.parametrize("case", BATCHES)
def test_a_checkpoint_gives_the_batch_back_in_the_form_of_another(case):
    batch = BATCHES[case]
    held = through_a_checkpoint(batch)
    assert inputs_digest(held) == inputs_digest(batch) != inputs_digest(another(batch))
    again = in_form_of(another(batch), held)
    assert_same(again, batch)
    assert inputs_digest(again) == inputs_digest(batch)


def test_what_is_held_is_not_taken_from_the_form():
    """Numbers, members of enumerations and optional parts are those of the checkpoint, objects those of the form."""
    batch = {"x": X, "n": 2, "kind": Kind.TEXT, "optional": None, "lock": threading.Lock()}
    form = {"x": X + 1, "n": 3, "kind": Kind.IMAGE, "optional": X, "lock": threading.Lock()}
    assert_same(in_form_of(form, through_a_checkpoint(batch)), batch | {"lock": form["lock"]})


def test_parts_that_the_form_does_not_have_are_given_back_without_their_types():
    for batch, form in [
        (Record(X, [1, 2]), Record(X, [1])),
        (Record(X, 1), Frozen(X, 1)),
        (Record(X, Pair(X, 1)), Record(X)),
        ((X, 1), (X, 1, 2)),
        ({"x": X, "y": 1}, {"x": X}),
        (Pair(X, np.zeros(2)), X),
        (Slotted(X), np.zeros(2)),
        ({"x": X, "y": [1, 2, 3]}, {"x": X, "y": np.zeros(3)}),
    ]:
        assert inputs_digest(in_form_of(form, through_a_checkpoint(batch))) == inputs_digest(batch)
    assert_same(in_form_of((X, 1, 2), through_a_checkpoint((X, 1))), [X, 1])
    assert_same(in_form_of(Record(X), through_a_checkpoint(Slotted(X))), {"x": X, "sizes": [3, 4]})
    assert_same(in_form_of({"x": X + 1}, through_a_checkpoint(Record(X, 1))), {"x": X, "meta": 1})


@pytest.mark.parametrize("case", BATCHES)
def test_samples_of_a_batch_have_its_type(case):
    batch = BATCHES[case]
    assert sample_count(batch) == 4
    first = first_samples(batch, 3)
    assert type(first) is type(batch) and sample_count(first) == 3
    assert_same(cpu_copy(batch), batch)
    tensor = (
        next(iter(batch.values()))
        if isinstance(batch, dict)
        else batch[0]
        if case == "NamedTuple"
        else X
    )
    if isinstance(tensor, torch.Tensor) and hasattr(first, "x"):
        assert torch.equal(first.x, X[:3]) and first.x.data_ptr() != X.data_ptr()


def test_entries_of_the_samples_are_selected_and_others_kept():
    batch = {
        "x": X,
        "sizes": np.arange(8).reshape(4, 2),
        "texts": ["a", "b", "c", "d"],
        "classes": ["cat", "dog"],
        "scale": 2,
    }
    first = first_samples(batch, 3)
    assert first["sizes"].tolist() == [[0, 1], [2, 3], [4, 5]] and first["texts"] == ["a", "b", "c"]
    assert first["classes"] == ["cat", "dog"] and first["scale"] == 2
    shared = first_samples(Frozen(X, X), 2)
    assert shared.x is shared.meta
    assert first_samples(AttributeDict(x=X), 2).x.shape == (2, 6, 8)


def test_digests_do_not_depend_on_objects_and_are_those_of_older_stores():
    assert inputs_digest(BatchEncoding({"x": X})) == digest({"x": X}) == inputs_digest({"x": X})
    assert inputs_digest(Pair(X, "a")) == digest((X, "a"))
    assert inputs_digest({"x": X, "o": object()}) == inputs_digest({"x": X, "o": threading.Lock()})
    assert inputs_digest({"x": X, "n": np.zeros(3)}) != inputs_digest({"x": X, "n": np.ones(3)})


def test_a_rank_takes_another_probe_of_the_first_rank():
    own, first = Record(X, threading.Lock()), Record(X + 1)
    assert as_first(own, inputs_digest(Record(X)), contents(Record(X))) is own
    assert_same(as_first(own, inputs_digest(first), contents(first)), Record(X + 1, own.meta))


# Runs.


class Batched(lightning.LightningModule):
    """A module whose batches are of any type, read by one function."""

    def __init__(self, get):
        super().__init__()
        self.model, self.get = Classifier(), get

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        return self.model(self.get(batch)).square().mean()

    def validation_step(self, batch, index):
        self.training_step(batch, index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def loader(make):
    rows = torch.utils.data.TensorDataset(X, torch.arange(4))
    return torch.utils.data.DataLoader(
        rows, 2, collate_fn=lambda rows: make(torch.stack([row[0] for row in rows]))
    )


def attribute(batch):
    return batch.x


RUNS = {
    "NamedTuple": lambda x: Pair(x, torch.zeros(len(x))),
    "dataclass": lambda x: Record(x, {"lock": threading.Lock()}),
    "attrs": lambda x: Attrs(x, np.zeros(len(x))),
    "object with .to": lambda x: Plain(x, object()),
}


SEEN = []  # of the script: what a function holds itself is copied where it runs


@pytest.mark.parametrize("case", RUNS)
def test_forward_receives_what_the_loader_yields(case):
    SEEN.clear()

    def forward(module, batch):
        SEEN.append(type(batch))
        return module(batch.x)

    watch = Watch(2, probe=None, forward=forward, dtype=torch.float64)
    module = Batched(attribute)
    trainer([watch], max_steps=2).fit(module, loader(RUNS[case]))
    assert set(SEEN) == {type(RUNS[case](X))} == {type(watch.probe)}
    assert_same_units(
        watch.units[2],
        tracker.measure(module.model, X[:2], k=2, dtype="float64").assign_coords(step=2),
    )


@pytest.mark.parametrize(
    "make", [RUNS["dataclass"], lambda x: UserDict(x=x, size=np.zeros(2), o=object())]
)
def test_the_forward_takes_parts_by_their_names(make):
    watch = Watch(2, probe=None)
    module = Batched(lambda batch: batch["x"] if isinstance(batch, UserDict) else batch.x)
    trainer([watch], max_steps=2).fit(module, loader(make))
    assert_same_units(
        watch.units[2], tracker.measure(module.model, X[:2], k=2).assign_coords(step=2)
    )


def resumable(tmp_path, max_steps, make, probe=None, validation=None, **options):
    watch = Watch(
        2, probe=probe, forward=lambda module, batch: module(batch.x), save_dir=tmp_path / "store"
    )
    runner = trainer([watch], max_steps=max_steps, keep=tmp_path, num_sanity_val_steps=1)
    runner.fit(
        Batched(attribute),
        loader(make),
        None if validation is None else loader(validation),
        **options,
    )
    return watch


def assert_continued(first, second):
    assert list(second.units) == [4] and type(second.probe) is type(first.probe)
    assert torch.equal(second.probe.x, first.probe.x)
    digests = {
        unit.attrs["inputs_sha256"] for unit in (*first.units.values(), *second.units.values())
    }
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["NamedTuple", "dataclass"])
def test_a_resumed_run_measures_the_same_inputs(tmp_path, case):
    """Lightning reads checkpoints with `weights_only=True`."""
    first = resumable(tmp_path, 2, RUNS[case])
    assert_continued(first, resumable(tmp_path, 4, RUNS[case], ckpt_path=tmp_path / "step=2.ckpt"))


@pytest.mark.slow
def test_a_probe_that_was_validated_in_another_form_than_trained_is_resumed_in_the_form_of_a_given_one(
    tmp_path,
):
    @dataclass
    class Local:
        x: torch.Tensor

    make, options = RUNS["NamedTuple"], {"validation": Local, "ckpt_path": tmp_path / "step=2.ckpt"}
    first = resumable(tmp_path, 2, make, validation=Local)
    with pytest.warns(
        UserWarning, match="other parts than the first batch.* give samples of its form: probe="
    ):
        skipping = resumable(tmp_path, 4, make, **options)
    assert (
        not skipping.units and "'dict' object has no attribute 'x'" in skipping.skipped.reasons[4]
    )
    assert_continued(first, resumable(tmp_path, 4, make, first.probe, **options))
    with pytest.warns(
        UserWarning, match="not that of the checkpoint, .*: the checkpoint's is measured"
    ):
        assert_continued(first, resumable(tmp_path, 4, make, Local(X[:2] + 1), **options))


# The stock collators of Hugging Face return BatchEncoding.

WORDS = {word: i for i, word in enumerate("[PAD] [UNK] a b c d e".split())}


def tokenizer() -> PreTrainedTokenizerFast:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


class LanguageModel(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = neox(vocab_size=8)

    def training_step(self, batch, index):
        return self.model(**batch).logits.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit_with_lightning(rows, collate):
    module, units = LanguageModel(), {}
    callback = tracker.CouplingCallback(
        2, k=2, on_measure=lambda unit: units.update({int(unit.step): unit})
    )
    trainer([callback], max_steps=2).fit(
        module, torch.utils.data.DataLoader(rows, 4, collate_fn=collate)
    )
    return module.model, units, callback.probe


def fit_with_transformers(rows, collate):
    class Unlabelled(Trainer):
        def compute_loss(self, model, inputs, **options):
            return model(**inputs).logits.square().mean()

    arguments = TrainingArguments(
        "unused",
        max_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    run = Unlabelled(neox(vocab_size=8), arguments, train_dataset=rows, data_collator=collate)
    units = {}
    callback = tracker.TransformersCallback(
        2, k=2, on_measure=lambda unit: units.update({int(unit.step): unit})
    )
    run.add_callback(callback)
    run.train()
    return run.model, units, callback.run.probe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collator", "fit"),
    [
        (DataCollatorWithPadding, fit_with_lightning),
        (DataCollatorForLanguageModeling, fit_with_transformers),
    ],
)
def test_stock_collators(collator, fit):
    words = tokenizer()
    rows = [words(text) for text in ("a b c d", "b c", "c d e a b", "a a")]
    collate = collator(words, **({} if collator is DataCollatorWithPadding else {"mlm": False}))
    model, units, probe = fit(rows, collate)
    assert list(units) == [0, 2] and isinstance(probe, BatchEncoding)
    expected = {name: value for name, value in collate(rows).items() if name != "labels"}
    assert_same_units(units[2], tracker.measure(model, expected, k=2).assign_coords(step=2))


def test_an_encoding_as_the_probe_of_a_loop():
    words, model = tokenizer(), neox(vocab_size=8)
    SEEN.clear()
    encoded = words(["a b c", "b c d"], return_tensors="pt")  # holds objects of the tokenizer, too

    def forward(model, batch):
        SEEN.append(type(batch))
        return model(batch.input_ids)

    unit = tracker.Watch(1, k=2, probe=encoded, forward=forward)(0, model)
    assert set(SEEN) == {BatchEncoding}
    expected = tracker.measure(model, {"input_ids": encoded["input_ids"]}, k=2)
    np.testing.assert_allclose(unit["miscoupling"], expected["miscoupling"], rtol=1e-12)


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
    assert tracker.measure(Classifier(), UserDict(x=X, size=np.zeros(2)), k=2).sizes["prompt"] == 4
    with pytest.raises(UsageError, match="does not take these inputs.*'y'"):
        tracker.measure(Classifier(), UserDict(x=X, y=X), k=2)
