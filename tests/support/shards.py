"""Checkpoints whose weights are in two files."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.support.suite import STEPS, checkpoint_of

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def shard(snapshot: Path):
    """Split the weights into two files with an index, as large models are published."""
    weights = load_file(snapshot / "model.safetensors")
    names = sorted(weights)
    halves = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for file, some in halves.items():
        save_file(
            {name: weights[name] for name in some}, snapshot / file, metadata={"format": "pt"}
        )
    index = {
        "metadata": {},
        "weight_map": {name: file for file, some in halves.items() for name in some},
    }
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model.safetensors").unlink()


def plant(root: Path, step: int, *shards: str):
    """Replace shards of a step by those of the last step."""
    for name in shards:
        shutil.copy(
            checkpoint_of(root, STEPS[-1]) / name,
            checkpoint_of(root, step) / name,
        )
