"""`python -m tests.golden write DIR [CASE ...]` and `python -m tests.golden compare BEFORE AFTER [--tolerance RTOL]`.

To write the results of another revision with this file, `PYTHONPATH=OTHER:THIS python -P -m tests.golden write DIR`, with the
roots of two working trees.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if two sets differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser(
        "write", help="write the results of all cases, each to a directory of its own"
    )
    writing.add_argument("directory", type=Path)
    writing.add_argument("cases", nargs="*", help="only these cases")
    comparing = commands.add_parser("compare", help="print a line for each difference of two sets")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="difference allowed, relative to a variable's largest value",
    )
    given = parser.parse_args(arguments)
    if given.command == "write":
        write(given.directory, given.cases)
        return 0
    from tests.golden.comparison import compare

    lines = compare(given.before, given.after, given.tolerance)
    print("\n".join([*lines, f"{len(lines)} differences"]))
    return bool(lines)


def write(directory: Path, names: Sequence[str]) -> None:
    # One thread, as rounding depends on their number; libraries read this when they are first imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    from tests.golden.cases import CASES

    for name in names or CASES:
        started = time.perf_counter()
        (directory / name).mkdir(parents=True)
        with redirect_stdout(io.StringIO()):  # summaries of training runs
            CASES[name](directory / name)
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
