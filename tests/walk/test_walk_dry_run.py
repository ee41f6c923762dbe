"""`python -m tracker.pythia ... --dry_run`: what it prints, and that it fetches no weights and writes nothing."""

import shutil
from pathlib import Path

import pytest
import torch

import tracker
from checkpoints.configuration import pythia_shapes
from checkpoints.load import load
from tests.conftest import USUAL
from tests.support.files import configured
from tests.support.shards import SHARDS, plant
from tests.support.suite import STEPS, copied, snapshots
from tracker import pythia
from tracker.common.text import size


def dry_run(capsys, *arguments: str) -> dict[str, str]:
    """Run a dry run; return its entries by label."""
    assert pythia.main([*arguments, "--dry_run", "true"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.partition("dry run")[2].splitlines()) <= 80
    entries = {}
    label = ""
    for line in out.splitlines():
        label = line[:12].strip() or label
        entries[label] = f"{entries.get(label, '')} {line[13:]}".strip()
    return entries | {"": out}


def files_below(*directories: Path) -> set[Path]:
    return {file for directory in directories for file in directory.rglob("*") if file.is_file()}


def test_only_configurations_are_requested_and_nothing_is_written(walker, served, capsys, tmp_path):
    plant(served.root, 2, *SHARDS)
    found = dry_run(capsys, *walker.arguments())
    assert "step       2  its weights are identical to those of step" in found[""]
    assert (
        found["to measure"]
        == f"{len(STEPS) - 1}: step {', '.join(str(step) for step in STEPS if step != 2)}"
    )
    assert not [path for path in served.requested("resolve") if path.endswith(".safetensors")]
    assert not files_below(walker.out, tmp_path / "cache")
    assert found["blocks"].startswith("3 blocks") and "per checkpoint" in found["in all"]


@pytest.mark.slow
def test_bytes_count_shared_files_once_and_cached_ones_not(walker, served, capsys):
    files = [file for file in next((served.root).rglob("snapshots")).glob("*/*") if file.is_file()]
    # The tokenizer and others are shared
    one = sum(len(content) for content in {file.read_bytes() for file in files})
    listed = dry_run(capsys, *walker.arguments("--disk_budget", "1MB"))
    assert listed["download"].startswith(size(one))
    assert "0 MB are in the cache" in listed["download"]
    assert walker.main("--steps", "2") == 0
    after = dry_run(capsys, *walker.arguments())
    assert float(after["download"].split()[0]) < float(listed["download"].split()[0])
    assert after["to measure"].startswith(f"{len(STEPS) - 1}:")


@pytest.fixture
def served_pythia(served, suite):
    """Serve two revisions of Pythia 14m on the hub: files of the right size, and nano's tokenizer."""
    repository, shape = served.root / "models--EleutherAI--pythia-14m", pythia_shapes()["14m"]
    for step in (128, 256):
        snapshot = repository / "snapshots" / f"{step:040}"
        copied(suite, 8, snapshot)
        shape.config(dtype="float16").save_pretrained(snapshot)
        (snapshot / "model.safetensors").unlink()
        with open(snapshot / "pytorch_model.bin", "wb") as file:
            file.write(bytes([step // 128]))
            file.truncate(shape.file_bytes)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / f"step{step}").write_text(snapshot.name)
    return served


def test_the_hub_is_not_asked_about_pythia(walker, served_pythia, capsys):
    found = dry_run(capsys, *walker.arguments("--steps", "128,256", "--on", "h100", model="14m"))
    assert not served_pythia.requested("pythia")
    assert (
        found["download"].startswith("107 MB, 0.9 s at 1 Gbit/s; 0 MB")
        and "53.3 MB per" in found["disk"]
    )
    assert found["sizes"].startswith(
        "2 checkpoints computed from the shape that ships in checkpoints/data/pythia.toml"
    )
    assert found["model"].startswith("from the shape in checkpoints/data/pythia.toml")
    assert "per checkpoint" in found["in all"] and "H100" in found["time"]
    assert "; h100, float32; " in found[""]


def test_what_the_cache_holds_is_not_computed(walker, served_pythia, capsys, monkeypatch, tmp_path):
    """Without a connection, one revision of two is in the cache."""
    cache = tmp_path / "cache" / "models--EleutherAI--pythia-14m"
    shutil.copytree(served_pythia.root / cache.name, cache)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    found = dry_run(capsys, *walker.arguments("--steps", "128,512", model="14m"))
    assert found["download"].startswith("53.3 MB, 0.4 s at 1 Gbit/s; 53.3 MB are in")
    assert found["sizes"].startswith("1 checkpoint as listed; 1 checkpoint computed from the shape")
    assert found["model"].startswith("from the checkpoint's configuration")


def test_sizes_that_nobody_knows_are_not_stated(walker, suite, capsys, monkeypatch):
    """The cache holds references alone of a repository whose shape does not ship."""
    for snapshot in snapshots(suite).parent.parent.glob("models--block-coupling--nano/refs/*"):
        reference = walker.directory / "cache" / "models--org--other" / "refs" / snapshot.name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(snapshot.read_text())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(walker.directory / "cache"))
    found = dry_run(capsys, *walker.arguments(model="org/other"))
    assert found["download"] == "not known: neither the hub nor the cache lists the files"
    assert "disk" not in found
    assert found["time"].startswith("not estimated")


def test_the_shape_gives_the_operations_of_the_loaded_model(walker, suite, capsys, tmp_path):
    ids = torch.arange(12).reshape(2, 6)
    torch.save(ids, tmp_path / "ids.pt")
    copied(suite, 8, tmp_path / "model")
    options = ("--inputs", str(tmp_path / "ids.pt"), "--tokens", "all", "--on", "h100", *USUAL)
    found = dry_run(capsys, *walker.arguments(*options, model=str(tmp_path / "model")))
    model, _ = load(tmp_path / "model")
    cost = tracker.measure(model, ids, k=[4, 8], tokens="all", dry_run=True)
    assert found["blocks"] == str(cost.blocks) and "Jacobians at 12 tokens" in found["inputs"]
    assert f"{cost.operations:.2g} operations; H100" in found["time"]
    assert "download" not in found and "in all" in found


def test_an_absurd_configuration_is_stated_before_memory_is_allocated(walker, served, capsys):
    for config in served.root.rglob("config.json"):
        configured(vocab_size=10**10)(config.parent)
    found = dry_run(capsys, *walker.arguments())
    assert "not estimated" in found["time"] and "and the weight files hold" in found["time"]
