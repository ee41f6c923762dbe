"""The arguments that every step takes."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Given:
    """Where a step runs, whether in small, and where its result goes."""

    device: str
    small: bool
    out: Path


def parse(module: str, description: str | None, arguments: Sequence[str] | None) -> Given:
    """Read a step's command line. argparse: jsonargparse may be among the packages that a machine lacks."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(description or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--small", action="store_true", help="small sizes, to test the step itself")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    parsed = parser.parse_args(arguments)
    return Given(parsed.device, parsed.small, parsed.out)
