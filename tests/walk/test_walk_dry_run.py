"""`python -m tracker.pythia ... --dry_run`: what it prints, and that it fetches no weights and writes nothing."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.walk.malformed import configured
from tests.walk.test_walk import STEPS
from tests.walk.test_walk_hub import SHARDS, plant, served  # noqa: F401
from tracker import pythia
from tracker.measures.cost import size


def dry_run(capsys, *arguments: str) -> dict[str, str]:
    """Run a dry run; return its entries by label."""
    assert pythia.main([*arguments, "--dry_run", "true"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.partition("dry run")[2].splitlines()) <= 80
    entries: dict[str, str] = {}
    label = ""
    for line in out.splitlines():
        label = line[:12].strip() or label
        entries[label] = f"{entries.get(label, '')} {line[13:]}".strip()
    return entries | {"": out}


def files_below(*directories: Path) -> set[Path]:
    return {file for directory in directories for file in directory.rglob("*") if file.is_file()}


def test_only_configurations_are_requested_and_nothing_is_written(walker, served, capsys, tmp_path):  # noqa: F811
    plant(served.root, 2, *SHARDS)
    found = dry_run(capsys, *walker.arguments())
    assert "step       2  its weights are identical to those of step" in found[""]
    assert found["to measure"] == f"{len(STEPS) - 1}: step {', '.join(str(step) for step in STEPS if step != 2)}"
    assert not [path for path in served.requested("resolve") if path.endswith(".safetensors")]
    assert not files_below(walker.directory / "out", tmp_path / "cache")
    assert found["blocks"].startswith("3 blocks") and "per checkpoint" in found["in all"]


@pytest.mark.slow
def test_bytes_count_shared_files_once_and_cached_ones_not(walker, served, capsys):  # noqa: F811
    one = sum(file.stat().st_size for file in next((served.root).rglob("snapshots")).glob("*/*") if file.is_file())
    listed = dry_run(capsys, *walker.arguments("--disk_budget", "1MB"))
    assert listed["download"].startswith(size(one)) and "0 MB are in the cache" in listed["download"]
    assert pythia.main(walker.arguments("--steps", "2")) == 0
    after = dry_run(capsys, *walker.arguments())
    assert float(after["download"].split()[0]) < float(listed["download"].split()[0])
    assert after["to measure"].startswith(f"{len(STEPS) - 1}:")


def test_sizes_that_nobody_lists_are_not_stated(walker, served, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = dry_run(capsys, "--model", "70m", "--steps", "128,256")
    assert found["download"] == "not known: neither the hub nor the cache lists the files" and "disk" not in found
    assert found["time"].startswith("not estimated")


def test_a_directory_of_checkpoints_needs_no_hub(walker, suite, capsys, tmp_path):
    for i, snapshot in enumerate(next(suite.rglob("snapshots")).iterdir()):
        shutil.copytree(snapshot, tmp_path / "run" / f"step{i + 1}")
    found = dry_run(capsys, *walker.arguments(model=str(tmp_path / "run")))
    assert "download" not in found and "in all" in found


def test_the_timed_model_is_random_and_has_two_blocks(walker, served, capsys, monkeypatch):  # noqa: F811
    from tracker import measurement

    seen = []
    real = measurement.estimate_cost

    def watching(model, blocks, *rest):
        seen.append((len(blocks.names), rest[-1], torch.get_rng_state()))
        return real(model, blocks, *rest)

    monkeypatch.setattr(measurement, "estimate_cost", watching)
    before = torch.get_rng_state()
    dry_run(capsys, *walker.arguments())
    ((blocks, depth, state),) = seen
    assert (blocks, depth) == (2, 3) and torch.equal(state, before) and torch.equal(torch.get_rng_state(), before)


def test_an_absurd_configuration_is_stated_before_memory_is_allocated(walker, served, capsys):  # noqa: F811
    for config in served.root.rglob("config.json"):
        configured(vocab_size=10**10)(config.parent)
    found = dry_run(capsys, *walker.arguments())
    assert "not estimated" in found["time"] and "parameters, and the weight files hold" in found["time"]
