"""The progress of a walk: a line for each checkpoint and, on a terminal, bars for the whole and for each download."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from tracker.common.progress import is_interactive

INTERVAL = 30.0  # seconds between lines about a download, where there is no terminal


class Progress:
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
def progress(total: int) -> Iterator[Progress]:
    """Show the progress of `total` checkpoints."""
    with tqdm(desc="measuring", total=total, unit=" checkpoints", disable=not is_interactive()) as bar:
        yield Progress(bar)


def _amount(have: int, size: int) -> str:
    """Format a number of bytes out of a total, in MB or GB."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{have / unit:.3g} of {size / unit:.3g} {name}"
