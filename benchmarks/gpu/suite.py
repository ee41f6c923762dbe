"""Run the GPU tests so that a test that ends its process, or hangs, loses one test: `python -m benchmarks.gpu.suite`.

pytest runs in a process of its own. If that ends early, or a test takes too long, the test is recorded as such and another
process runs the rest. A result file from before is continued: tests that passed then are not repeated.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import process
from benchmarks.gpu.arguments import parse
from tracker.common.files import write_atomic

ROOT = Path(__file__).parents[2]
PATHS = ("tests/gpu",)
QUICK = ("-k", "values_vectors_and_certificate")  # the tests of `--small`
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # what PyTorch's deterministic mode asks for
PATIENCE = 100.0  # seconds for one test, or for the imports before the first one
INTERVAL = 0.2
KEPT = ("passed", "skipped")

Tests = dict[str, dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; return 0 if all passed."""
    given = parse("benchmarks.gpu.suite", __doc__, arguments)
    tests: Tests = {}
    if given.out.exists():
        tests = json.loads(given.out.read_text())["tests"]
        tests = {name: test for name, test in tests.items() if test["outcome"] in KEPT}
    marked = "gpu" if given.device.startswith("cuda") else "not gpu"
    return run([*PATHS, "-m", marked, *(QUICK if given.small else ())], given.out, tests)


def run(selection: Sequence[str], out: Path, tests: Tests, patience: float = PATIENCE) -> int:
    """Run the selected tests but those in `tests`, to which outcomes are added; write `out` after every test."""
    while True:
        before = len(tests)
        code = _session(selection, out, tests, patience)
        save(out, tests)
        if code in (0, 1, 5):  # all ran; 5: none was left to run
            break
        if len(tests) == before:  # pytest itself fails
            return 1
    return 0 if tests and all(test["outcome"] in KEPT for test in tests.values()) else 1


def _session(selection: Sequence[str], out: Path, tests: Tests, patience: float) -> int:
    """Run pytest once; return its exit status, or -1 if tests are left to another session."""
    with tempfile.TemporaryDirectory() as directory:
        log, done = Path(directory) / "outcomes", Path(directory) / "done"
        log.touch()
        done.write_text("\n".join(tests))
        options = ["-p", "benchmarks.gpu.outcomes", "-p", "no:cacheprovider", "--tb=short"]
        running = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *selection],
            cwd=ROOT,
            env={**os.environ, **DETERMINISTIC, "TRACKER_OUTCOMES": str(log), "TRACKER_OUTCOMES_DONE": str(done)},
        )
        reader = _Reader(log, tests)
        try:
            while running.poll() is None:
                time.sleep(INTERVAL)
                if reader.read():
                    save(out, tests)
                if time.monotonic() - reader.last > patience:
                    reader.lose("timed out", f"took more than {patience:.0f} s")
                    return -1
        finally:
            process.end(running)
            reader.read()
        if reader.current:
            reader.lose("crashed", process.describe(running.returncode))
        return -1 if reader.current or reader.unusable else running.returncode


class _Reader:
    """The outcomes that a session has written so far."""

    def __init__(self, log: Path, tests: Tests) -> None:
        self.log, self.tests = log, tests
        self.position = 0
        self.last = time.monotonic()
        self.current = ""  # the test that runs
        self.unusable = False

    def read(self) -> bool:
        """Read what is new; return whether there is anything."""
        text = self.log.read_text()
        new = text[self.position : text.rfind("\n") + 1]
        self.position += len(new)
        for line in new.splitlines():
            self._add(json.loads(line))
            self.last = time.monotonic()
        return bool(new)

    def _add(self, event: dict[str, Any]) -> None:
        if "started" in event:
            self.current = event["started"]
        elif "ended" in event:
            name = event.pop("ended")
            self.tests[name] = {key: value for key, value in event.items() if value or key == "outcome"}
            self.current = ""
        self.unusable = self.unusable or "unusable" in event

    def lose(self, outcome: str, message: str) -> None:
        """Record the test that runs, or the imports before it, as lost."""
        name = self.current or "(before the first test)"
        self.tests[name] = {"outcome": outcome, "message": message}


def save(out: Path, tests: Tests) -> None:
    """Write the outcomes, and how many there are of each."""
    counts = dict(Counter(test["outcome"] for test in tests.values()))
    write_atomic(out, (json.dumps({"counts": counts, "tests": tests}, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
