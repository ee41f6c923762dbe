"""Run the steps: `python -m benchmarks.gpu`, continued by the same command, or `--steps machine,tests`.

Only the standard library is imported here: this process must outlive a GPU that hangs and packages that are missing.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu import process, summary
from benchmarks.gpu.record import FINISHED, Record, read
from benchmarks.gpu.steps import BY_NAME, STEPS, Step

ROOT = Path(__file__).parents[2]
RESULT = Path("benchmarks/results/gpu.json")
LIMIT = 570  # seconds: a little less than ten minutes
SMALL_LEAST = 5  # seconds without which no step is started in small
IMPORTS = 150  # seconds for the check of packages and device
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if every step is done, 1 if one failed or did not run, 2 for bad usage."""
    given = _parser().parse_args(arguments)
    given.out = given.out or (Path("build/gpu-small.json") if given.small else RESULT)
    if given.list:
        print("\n".join(f"{step.name:18}{step.limit:5} s  {step.text}" for step in STEPS))
        return OK
    try:
        chosen = _chosen(given.steps)
        if given.table:
            print(summary.markdown(read(given.out) if given.out.exists() else {}))
            return OK
        record = Record(given.out, given.device, given.small)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(given, record, chosen)
    except KeyboardInterrupt:
        print(f"interrupted; {record.file} has what was measured, and the same command continues", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    description = "Measure on a GPU all that this project wants to know; see docs/gpu.md."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=description)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 and so on, or cpu")
    parser.add_argument("--small", action="store_true", help="small sizes, to test the steps themselves")
    parser.add_argument(
        "--steps", help="names with commas between them, also if they are done (default: all that are not)"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for all steps (default: {LIMIT})")
    parser.add_argument("--out", type=Path, help=f"JSON file (default: {RESULT}, in small build/gpu-small.json)")
    parser.add_argument("--wheels", type=Path, help="directory of wheels of packages that are not installed")
    parser.add_argument("--list", action="store_true", help="list the steps with their time limits")
    parser.add_argument("--table", action="store_true", help="print the results in --out as Markdown tables")
    return parser


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _chosen(names: str | None) -> list[Step] | None:
    """Return the steps that are named; None for all.

    Raises:
        ValueError: for a name that no step has.
    """
    if names is None:
        return None
    unknown = [name for name in names.split(",") if name not in BY_NAME]
    if unknown:
        raise ValueError(f"--steps {names}: {unknown[0]!r} is no step; choose from {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in names.split(",")]


def _run(given: argparse.Namespace, record: Record, chosen: list[Step] | None) -> int:
    deadline = time.monotonic() + given.limit
    if chosen is None:  # first what has not run: what failed before may fail again
        rest = [step for step in STEPS if record.status(step.name) not in FINISHED]
        chosen = sorted(rest, key=lambda step: record.status(step.name) not in ("", "not run"))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        try:
            wheels = _install(given.wheels, directory / "wheels") if given.wheels else None
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"error: --wheels {given.wheels} can't be installed ({error})", file=sys.stderr)
            return USAGE
        options = {"cwd": ROOT, "env": process.environment(wheels, ROOT, given.small)}
        check = ["-m", "benchmarks.gpu.requirements", "--device", given.device]
        checked = process.run(check, IMPORTS, directory, None, **options)
        if checked["status"] != "ok":
            print(checked["output"].strip() or f"error: {given.device} does not answer", file=sys.stderr)
            return USAGE
        for step in chosen:
            left = deadline - time.monotonic()
            if left < (min(step.least, SMALL_LEAST) if given.small else step.least):
                if not record.status(step.name):
                    record.put(step.name, {"status": "not run", "text": step.text})
                continue
            print(f"{step.name}: {step.text} ... ", end="", flush=True)
            outcome = _step(step, given, record, min(step.limit, left), directory, options)
            record.put(step.name, {"text": step.text, "commit": _commit(), **outcome})
            print(f"{outcome['status']}, {outcome['seconds']:.0f} s", flush=True)
    print(f"\n{summary.table(record.content)}\n{record.file}")
    return OK if all(record.status(step.name) in FINISHED for step in STEPS) else FAILED


def _step(
    step: Step, given: argparse.Namespace, record: Record, limit: float, directory: Path, options: dict[str, Any]
) -> dict[str, Any]:
    """Run a step; its earlier result lies where it writes its own, so that it can continue."""
    result = directory / f"{step.name}.json"
    if "result" in record.steps.get(step.name, {}) and step.continues:
        result.write_text(json.dumps(record.steps[step.name]["result"]))
    return process.run(step.arguments(given.device, given.small, str(result)), limit, directory, result, **options)


def _install(wheels: Path, target: Path) -> Path:
    """Install wheels into a directory, without a network."""
    files = sorted(str(file) for file in wheels.glob("*.whl"))
    if not files:
        raise FileNotFoundError("there are no wheels in it")
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), *files], check=True)
    return target


def _commit() -> str:
    """Return the commit of the checkout; "" where there is no git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
