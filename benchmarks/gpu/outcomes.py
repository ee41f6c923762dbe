"""A pytest plugin that writes the outcome of every test as it ends: `-p benchmarks.gpu.outcomes`.

The variable `TRACKER_OUTCOMES` names a file, to which one JSON object a line is appended. Tests named in the file of
`TRACKER_OUTCOMES_DONE`, one a line, are left out. After a failure that leaves the GPU unusable (CUDA's sticky errors) the
session stops: every later test of this process would fail too.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

LENGTH = 600  # characters of an error that are kept


def _append(**event: Any) -> None:
    with open(os.environ["TRACKER_OUTCOMES"], "a") as file:
        file.write(json.dumps(event) + "\n")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are done, and put the rest into order."""
    done = set(Path(os.environ["TRACKER_OUTCOMES_DONE"]).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    left = [item for item in items if item.nodeid not in done]
    in_file = Counter(item.path for item in left)
    # Slow tests last, and before them the files with many tests: if time runs out, something of each file has run.
    items[:] = sorted(left, key=lambda item: (item.get_closest_marker("slow") is not None, in_file[item.path]))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write how many tests there are."""
    _append(collected=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test starts: it is the culprit if nothing follows."""
    _append(started=nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """Write the outcome of a test, and stop after a failure that leaves the GPU unusable."""
    report = yield
    if call.when == "call" or report.outcome != "passed":
        event = {"ended": item.nodeid, "outcome": report.outcome, "seconds": round(call.duration, 2)}
        if report.outcome == "skipped":
            event["message"] = str(report.longrepr[-1])[:LENGTH]
        elif report.failed:
            event["message"] = _message(report)
        _append(**event, properties=dict(item.user_properties))
        if report.failed and not _usable():
            item.session.shouldstop = "the GPU is unusable after this error"
            _append(unusable=item.nodeid)
    return report


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (str(crash.message) if crash is not None else str(report.longrepr))[:LENGTH]


def _usable() -> bool:
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
