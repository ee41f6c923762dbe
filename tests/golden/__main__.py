"""Golden results: what the package computes for a dozen small cases, compared with what it computed before.

python -m tests.golden check               # with the commit that tests/golden/reference.toml names, on this machine
python -m tests.golden write DIR [CASE ...]
"""

import io
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from tests.golden.comparison import compare

ROOT = Path(__file__).parents[2]
REFERENCE = Path(__file__).with_name("reference.toml")
BUILD = ROOT / "build" / "golden"
PACKAGES = ("tracker", "vit", "checkpoints")


def check() -> list[str]:
    """Write the results of the reference commit and of this working tree; return the differences that are not named."""
    reference = tomllib.loads(REFERENCE.read_text())
    commit = reference["commit"]
    shutil.rmtree(BUILD, ignore_errors=True)
    extract(commit)
    # Side by side, each with one thread
    sides = {f"commit {commit}": start("before", BUILD / "packages")}
    sides["this working tree"] = start("after", ROOT)
    if failed := [side for side, process in sides.items() if process.wait()]:
        raise SystemExit(
            f"{failed[0]} gives no results: {BUILD}/*.txt show the error; if the commit can't be run with today's dependencies, "
            f"name a newer one in {REFERENCE}"
        )
    found = compare(BUILD / "before", BUILD / "after", reference["tolerance"])
    return unnamed(found, reference["differences"])


def extract(commit: str):
    """Write the packages of a commit."""
    archive = BUILD / "packages.tar"
    BUILD.mkdir(parents=True)
    if subprocess.run(["git", "archive", "-o", archive, commit, *PACKAGES], cwd=ROOT).returncode:
        raise SystemExit(
            f"{REFERENCE} names commit {commit}, which git can't read: fetch the history (git fetch --unshallow), or name another"
        )
    shutil.unpack_archive(archive, BUILD / "packages", filter="data")


def start(side: str, packages: Path) -> subprocess.Popen:
    """Start to write the results of packages with this tree's cases."""
    command = [sys.executable, "-P", "-m", "tests.golden", "write", BUILD / side]
    settings = os.environ | {"PYTHONPATH": f"{packages}:{ROOT}"}
    log = (BUILD / f"{side}.txt").open("w")
    return subprocess.Popen(command, env=settings, stdout=log, stderr=log)


def unnamed(lines: Sequence[str], named: Mapping[str, str]) -> list[str]:
    """Return the differences that no name is the beginning of, and the names of none; * stands for any text."""
    patterns = {name: re.compile(re.escape(name).replace(r"\*", ".*")).match for name in named}
    found = [line for line in lines if not any(match(line) for match in patterns.values())]
    unused = [name for name, match in patterns.items() if not any(map(match, lines))]
    return found + [f"{REFERENCE.name}: no difference is {name!r}" for name in unused]


def write(directory: Path, names: Sequence[str]):
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
    match sys.argv[1:]:
        case ["check"]:
            differences = check()
            print("\n".join([*differences, f"{len(differences)} differences"]))
            sys.exit(bool(differences))
        case ["write", directory, *cases]:
            write(Path(directory), cases)
        case _:
            sys.exit(__doc__)
