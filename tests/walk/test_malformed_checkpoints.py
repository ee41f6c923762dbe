"""Malformed checkpoints are refused with one message each, do not stop the others, and none of their code runs."""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.load import load
from checkpoints.scores import read_from_checkpoint
from tests.support.files import configured, replaced
from tests.support.suite import STEPS, copied
from tracker import pythia
from tracker.common.errors import CheckpointError
from tracker.store import Store

SHARD = "model-00001-of-00001.safetensors"


class Executes:
    """An object whose pickle executes code where it is loaded without care: it creates a directory."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def indexed(weight_map: Any) -> Callable[[Path], None]:
    """Return a function that renames the weights as the only shard and adds this index."""

    def change(directory: Path):
        (directory / "model.safetensors").rename(directory / SHARD)
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )

    return change


def pickled(directory: Path):
    weights = dict(load_file(directory / "model.safetensors"))
    (directory / "model.safetensors").unlink()
    torch.save(
        weights | {"harmful": Executes(directory / "executed")}, directory / "pytorch_model.bin"
    )


def reweighted(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Path], None]:
    """Return a function that changes the weights."""

    def write(directory: Path):
        weights = change(load_file(directory / "model.safetensors"))
        (directory / "model.safetensors").unlink()
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return write


def fewer_blocks(directory: Path):
    depth = json.loads((directory / "config.json").read_text())["num_hidden_layers"] - 1
    reweighted(
        lambda weights: {n: value for n, value in weights.items() if f".layers.{depth}." not in n}
    )(directory)
    configured(num_hidden_layers=depth)(directory)


def of_own_class(directory: Path):
    configured(architectures=["Mine"])(directory)
    WITH_MORE(directory)


def with_code(file: str, **entries: Any) -> Callable[[Path], None]:
    """Return a function that adds a Python module, which creates `executed` when imported, and its entries in a file."""

    def change(directory: Path):
        (directory / "foreign.py").write_text(
            f"import os\nos.mkdir({str(directory / 'executed')!r})\n"
        )
        configured(file, **entries)(directory)

    return change


WITH_MORE = reweighted(lambda w: w | {"gpt_neox.extra": torch.ones(1)})
OWN_CODE = (
    r"needs Python code of its own, .* load the model yourself and call tracker\.measure\(model"
)
# One change for each branch of the code, and the message.
REFUSED = {
    "configuration: a list": (replaced("config.json", "[]"), "config.json is damaged: it holds a list"),
    "configuration: unusable": (configured(num_hidden_layers="six"), "can't be loaded .*num_hidden_layers.*download it again"),
    "too many layers": (configured(parts=[{"num_hidden_layers": 10**6}]), "num_hidden_layers = 1,000,000, and more than 1,000"),
    "attention of the hub": (configured(attn_implementation="kernels/attention"), "'kernels/attention', which transformers"),
    "attention of a part": (configured(attn_implementation={"text_config": "an/attention"}), "'an/attention'"),
    "too many words": (configured(vocab_size=10**12), "describes a model of .* parameters .*, and the weight files hold"),
    "a table too large": (
        configured(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}),
        "parameters and .* values in masks and tables",
    ),
    "own code": (
        with_code("config.json", model_type="foreign", auto_map={"AutoConfig": "foreign.Config"}),
        OWN_CODE,
    ),
    "own code of the model": (
        with_code("config.json", model_type="foreign", auto_map={"AutoConfig": "foreign.C", "AutoModel": "foreign.M"}),
        OWN_CODE,
    ),
    "code of another repository": (configured(model_type="foreign", auto_map={"AutoConfig": "some/one--foreign.C"}), OWN_CODE),
    "a pickle": (pickled, "not loaded: pickles can run code"),
    "index: no map": (indexed([]), r"no weight_map from tensors to files of its directory \(\[\]\)"),
    "index: another checkpoint": (indexed({"gpt_neox.embed_in.weight": f"../step1/{SHARD}"}), r"of its directory \('\.\./s"),
    "tokenizer: garbled": (replaced("tokenizer.json", "{"), "the tokenizer in .* can't be loaded"),
    "tokenizer: a panic": (
        configured("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "a library panicked",
    ),
    "tensors: missing": (reweighted(lambda w: dict(list(w.items())[1:])), r"do not fit.* 1 missing \(.* at random"),
    "tensors: unexpected": (WITH_MORE, r"1 unexpected \(gpt_neox\.extra\).*restore its files"),
    "tensors of a class of the user's": (of_own_class, "do not fit GPTNeoXForCausalLM.*names Mine.* --files .* --load"),
    "tensors: mis-shaped": (
        reweighted(lambda w: {name: value[:3].clone() if "final_" in name else value for name, value in w.items()}),
        r"2 mis-shaped \(gpt_neox\.final_layer_norm\.bias",
    ),
}  # fmt: skip
# Changes that are found later, in a walk.
FAILING = {
    "a panic in use": (
        configured(
            "tokenizer.json",
            normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
        ),
        "a library panicked",
    ),
    "half a character": (configured(hidden_act="\ud800"), r"\\ud800"),
    "no heads": (configured(num_attention_heads=0), "ZeroDivisionError"),
    "short context": (configured(max_position_embeddings=1), "tokens"),
    "infinite weights": (
        reweighted(lambda w: {n: value / 0 for n, value in w.items()}),
        "NaN or infinite weights",
    ),
    "fewer blocks": (fewer_blocks, "number of blocks"),
    "scores": (replaced("scores.json", "[1]"), "scores.json is not a table of scores"),
}
STEP_OF = {name: step for step, name in enumerate(FAILING, 2)}


def copy_of(suite: Path, directory: Path) -> Path:
    """Copy a sound checkpoint."""
    return copied(suite, STEPS[-1], directory)


def walk(directory: Path, *options: str) -> int:
    """Walk over the checkpoints in a directory; return the exit status."""
    prompts = directory / "prompts.txt"
    prompts.write_text("import os\nfor name in sorted(names)\n")
    given = f"--model {directory} --prompts {prompts} --out {directory}/out"
    usual = "--k 2 --measures coupling --wandb off --device cpu"
    return pythia.main([*given.split(), *usual.split(), *options])


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_checkpoint_is_refused_with_one_message(name, suite, tmp_path, monkeypatch):
    """Someone types "y" all the time: transformers asks on the terminal whether to run code."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    change, message = REFUSED[name]
    checkpoint = copy_of(suite, tmp_path / "step2")
    change(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)
    assert not (checkpoint / "executed").exists()


def test_legacy_masks_in_a_checkpoint_are_accepted(suite, tmp_path):
    checkpoint, mask = copy_of(suite, tmp_path / "step2"), torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    reweighted(lambda weights: weights | {"gpt_neox.layers.0.attention.bias": mask})(checkpoint)
    load(checkpoint)


@pytest.mark.parametrize(
    "content",
    ['{"lo\\u0000ss": 1}', '{"\\ud800": 1}', json.dumps({"x" * 1000: 1}), '{"a": 1' + "0" * 400 + "}", "[" * 100_000, "[1]"],
    ids=["NUL", "half a character", "a name without end", "a number without end", "nested", "a list"],
)  # fmt: skip
def test_malformed_scores_are_refused(content, tmp_path):
    (tmp_path / "scores.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"scores.json is not a table of scores .*; fix or remove it"
    ):
        read_from_checkpoint(tmp_path)


@pytest.mark.slow
def test_the_others_are_measured_and_each_failure_is_one_line(suite, tmp_path, monkeypatch):
    for step in (1, *STEP_OF.values(), 1000):
        copy_of(suite, tmp_path / f"step{step}")
    for name, (change, _) in FAILING.items():
        change(tmp_path / f"step{STEP_OF[name]}")
    # It refuses half of a surrogate pair
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    monkeypatch.setattr("sys.stderr", err := io.StringIO())
    assert walk(tmp_path) == 1
    assert Store(tmp_path / "out").steps() == [1, 1000]
    assert (tmp_path / "out" / "report.html").exists()
    lines = err.getvalue().splitlines()
    assert len(lines) == len(FAILING), err.getvalue()
    for name, (_, message) in FAILING.items():
        (line,) = [line for line in lines if line.startswith(f"failed: step {STEP_OF[name]}: ")]
        assert re.search(message, line), line


def test_code_of_a_tokenizer_that_is_not_needed_is_not_run(suite, tmp_path):
    """transformers has a class for tokenizer.json, and takes it in place of the checkpoint's own."""
    checkpoint = copy_of(suite, tmp_path / "step1")
    mapped = {"AutoTokenizer": [None, "foreign.Tokenizer"]}
    with_code("tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=mapped)(checkpoint)
    assert walk(tmp_path) == 0 and not (checkpoint / "executed").exists()


@pytest.mark.slow
def test_debug_prints_the_traceback_of_a_failed_revision(suite, tmp_path, capsys):
    FAILING["no heads"][0](copy_of(suite, tmp_path / "step1"))
    assert walk(tmp_path) == 1 and "Traceback" not in capsys.readouterr().err
    assert walk(tmp_path, "--debug") == 1 and "ZeroDivisionError" in capsys.readouterr().err
