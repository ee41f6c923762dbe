"""What Weights & Biases has written of an offline run."""

import json
import subprocess
import sys
from pathlib import Path


def records(file: Path) -> list[dict]:
    """Return all records in the file of an offline run."""
    inspect = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", file]
    return [
        json.loads(line)
        for line in subprocess.run(inspect, capture_output=True, text=True).stdout.splitlines()
    ]


def of(variant: str, among: list[dict]) -> list[dict]:
    return [record[variant] for record in among if record["type"] == variant]


def offline_run(directory: Path) -> Path:
    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    return file
