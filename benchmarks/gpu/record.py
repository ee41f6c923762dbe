"""The JSON file of all steps: read, checked and written after every step."""

import json
from pathlib import Path
from typing import Any

from tracker.common.files import write_atomic

SCHEMA = 1
FINISHED = ("ok",)  # statuses of steps that are not repeated unless `--steps` names them


class Record:
    """Results by step, in a file that is always complete.

    Args:
        file: the JSON file; one that exists is continued.
        device: cuda or cpu.
        small: whether the steps run in small.

    Raises:
        ValueError: if the file holds something else.
    """

    def __init__(self, file: Path, device: str, small: bool) -> None:
        self.file = file
        self.content: dict[str, Any] = {"schema": SCHEMA, "device": device, "small": small, "steps": {}}
        if file.exists():
            found = read(file)
            expected = {name: self.content[name] for name in ("schema", "device", "small")}
            if {name: found.get(name) for name in expected} != expected:
                raise ValueError(f"{file} holds other results than those of {expected}; give another --out")
            self.content = found

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """What each step gave, by name."""
        return self.content["steps"]

    def status(self, name: str) -> str:
        """Return a step's status; "" if nothing is recorded."""
        return self.steps.get(name, {}).get("status", "")

    def put(self, name: str, outcome: dict[str, Any]) -> None:
        """Record a step and write the file."""
        self.steps[name] = outcome
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.file, (json.dumps(self.content, indent=1) + "\n").encode())


def read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of all steps.

    Raises:
        ValueError: if it is none.
    """
    try:
        content = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not a JSON file ({error}); give another --out") from error
    if not isinstance(content, dict) or "steps" not in content:
        raise ValueError(f"{file} was not written by `python -m benchmarks.gpu`; give another --out")
    return content
