"""`--inputs FILE`: what is read, and one message for everything else."""

from pathlib import Path

import numpy as np
import pytest
import torch

import tracker
from checkpoints.load import load
from tests.support.suite import checkpoint_of
from tracker.walk.command import parse
from tracker.walk.plan import read_inputs

SAVE = "give a file that torch.save wrote, with a tensor or a dictionary of tensors"


def refusal(walker, capsys, file: Path) -> str:
    assert walker.main("--inputs", str(file)) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith(f"error: --inputs {file} ")
    return err


def test_what_a_tokenizer_returns_is_refused_and_its_tensors_are_measured(walker, suite, capsys):
    """transformers.BatchEncoding is no tensor and no dictionary, and a pickle of it is not read."""
    model, tokenizer = load(checkpoint_of(suite, 8))
    file = walker.directory / "inputs.pt"
    encoding = tokenizer(5 * ["import os"], return_tensors="pt")
    torch.save(encoding, file)
    said = refusal(walker, capsys, file)
    assert "it holds other objects than tensors, whose pickles can run code" in said
    assert SAVE in said and "torch.save(dict(encoding), FILE)" in said
    torch.save(dict(encoding), file)
    assert walker.main("--inputs", str(file), "--steps", "8") == 0
    assert (
        "5 samples, class token, or last token of a model without one; " in capsys.readouterr().out
    )
    expected = tracker.measure(model, dict(encoding), measures="entropy")
    found = tracker.open_results(walker.out).sel(step=8)
    np.testing.assert_array_equal(found.entropy, expected.entropy)
    assert found.attrs["token_ids_sha256"] == expected.attrs["token_ids_sha256"]


@pytest.mark.parametrize("held", [5, None, [1, 2], {"a": 1}, {}, "text", torch.tensor(3)], ids=repr)
def test_other_objects_are_refused(held, walker, capsys):
    torch.save(held, walker.directory / "inputs.pt")
    assert SAVE in refusal(walker, capsys, walker.directory / "inputs.pt")


@pytest.mark.parametrize("legacy", [False, True])
def test_damaged_files_are_refused(legacy, walker, capsys):
    """Of a changed file, torch raises errors of many types."""
    file, rng = walker.directory / "inputs.pt", np.random.default_rng(0)
    torch.save(
        {"input_ids": torch.arange(10)[None]}, file, _use_new_zipfile_serialization=not legacy
    )
    whole, walk, refused = file.read_bytes(), parse(walker.arguments("--inputs", str(file))), 0
    for _ in range(60):
        content = np.frombuffer(whole, np.uint8).copy()
        content[rng.integers(0, min(len(content), 600), 8)] = rng.integers(0, 256, 8)
        file.write_bytes(content.tobytes())
        try:
            read_inputs(walk)
        except ValueError as error:
            assert str(error).startswith(f"--inputs {file} ") and SAVE in str(error)
            refused += 1
    assert refused > 30
    file.unlink()
    assert "can't be read" in refusal(walker, capsys, file)
    file.mkdir()
    assert "can't be read" in refusal(walker, capsys, file)
