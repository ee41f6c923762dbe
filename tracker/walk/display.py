"""What a walk shows: its plan, a line for each checkpoint and, on a terminal, bars for the whole and for each download; at the
end, repeated weights and other token ids.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

from tracker.common.steps import describe_repeat, find_repeats
from tracker.common.text import counted
from tracker.walk.plan import WalkPlan

if TYPE_CHECKING:
    from tracker.loggers.protocol import Row


INTERVAL = 30.0  # seconds between lines about a download, where there is no terminal


class WalkProgress:
    """Shows the progress of a walk, from any thread.

    Args:
        bar: counts the checkpoints.
    """

    def __init__(self, bar: tqdm):
        self.bar, self.done, self.started = bar, 0, time.perf_counter()

    def notify(self, line: str) -> None:
        """Show a line."""
        tqdm.write(line)
        sys.stdout.flush()

    def advance(self, line: str) -> None:
        """Count a finished checkpoint; `line` states its result."""
        self.done += 1
        remaining = (time.perf_counter() - self.started) / self.done * (self.bar.total - self.done)
        left = f"  about {remaining:.0f} s left" if remaining else ""
        self.notify(f"[{self.done}/{self.bar.total}] {line}{left}")
        self.bar.update()

    def downloading(self, name: str, size: int) -> Callable[[int], None]:
        """Start to show a download; return a function that takes the number of bytes as they arrive."""
        bar = tqdm(
            desc=f"fetching {name}", total=size, unit="B", unit_scale=True, leave=False, disable=self.bar.disable
        )
        lock, have = threading.Lock(), 0
        started = said = time.perf_counter()

        def count(arrived: int) -> None:
            nonlocal have, said
            with lock:
                have += arrived
                bar.update(arrived)
            if have >= size:
                bar.close()
            now = time.perf_counter()
            if have >= size or (bar.disable and now - said > INTERVAL):
                said = now
                self.notify(f"{name}: {_amount(have, size)} fetched, {have / 1e6 / (now - started):.1f} MB/s")

        return count


@contextmanager
def progress(total: int) -> Iterator[WalkProgress]:
    """Show the progress of `total` checkpoints; bars where standard error is a terminal."""
    with tqdm(desc="measuring", total=total, unit=" checkpoints", disable=None) as bar:
        yield WalkProgress(bar)


def _amount(have: int, size: int) -> str:
    """Format a number of bytes out of a total, in MB or GB."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{have / unit:.3g} of {size / unit:.3g} {name}"


def print_overview(plan: WalkPlan, missing: int) -> None:
    """Print what is measured, and which checkpoints are suspect."""
    selection, measurement = plan.selection, plan.measurement
    count, inputs = len(selection.checkpoints), measurement.inputs
    if isinstance(inputs, Mapping):
        inputs = next(value for value in inputs.values() if getattr(value, "ndim", 0))
    print(
        f"{selection.suite.name}: {counted(count, 'checkpoint')}, {count - missing} already measured; "
        f"{counted(len(inputs), 'prompt')}; {measurement.device}, "
        f"{measurement.settings.dtype}; results in {plan.output.store.path}",
        flush=True,
    )
    for notice in plan.notices:
        print(f"note: {notice}", flush=True)
    if selection.offline:
        print(f"note: {selection.offline}; what the cache holds is measured", flush=True)
    for action, suspect in (
        ("left out", selection.excluded),
        ("measured, and marked as suspect", selection.suspect),
    ):
        if suspect:
            print(f"{len(suspect)} of the selected revisions are suspect; they are {action}:")
            for step, reason in suspect.items():
                print(f"  step {step:>7}  {reason}", flush=True)
    if selection.excluded:
        print("--allow_suspect measures them too", flush=True)


def print_repeats(fingerprints: Mapping[int, str]) -> None:
    """Print which steps have the same weights."""
    for step, earlier in find_repeats(fingerprints).items():
        print(f"note: {describe_repeat(step, earlier)}", flush=True)


def print_other_tokens(hashes: Mapping[int, str]) -> None:
    """Print which steps were measured on other token ids."""
    from tracker.analysis.doubts import other_tokens

    for line in other_tokens(dict(sorted(hashes.items()))):
        print(f"note: {line}", flush=True)


def headline(row: "Row") -> str:
    """Return the result of a checkpoint in a few words."""
    from tracker.measures.registry import LSS, MEAN_OFFDIAG, MEAN_OFFDIAG_NULL

    parts = []
    if MEAN_OFFDIAG in row.scalars:
        value, null = row.scalars[MEAN_OFFDIAG], row.scalars[MEAN_OFFDIAG_NULL]
        parts.append(f"miscoupling {value:.3f} (null {null:.3f}, K={int(row.matrices['k'].min())})")
    if LSS in row.scalars:
        parts.append(f"LSS {row.scalars[LSS]:.2f}")
    return "  ".join(parts) or "measured"
