"""What a walk shows: its plan, a line for each checkpoint and, on a terminal, bars for the whole and for each download; at the
end, repeated weights and other token ids.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from checkpoints.hub import repo_dir
from checkpoints.suites import Checkpoint
from tracker.common.errors import CheckpointError, UsageError
from tracker.common.text import at_tokens, counted, describe_repeat, escaped, find_repeats, size
from tracker.walk.plan import SelectedCheckpoints, WalkPlan

if TYPE_CHECKING:
    from tracker.walk.units import Known

INTERVAL = 30.0  # seconds between lines about a download, where there is no terminal
CONNECT = "run the same command again with a connection to the hub, or set HF_HUB_CACHE to a cache that holds them"


def reason(error: Exception, debug: bool) -> str:
    """Return why a checkpoint failed."""
    if isinstance(error, (CheckpointError, UsageError)):
        return str(error)
    return f"{type(error).__name__}: {error}" + ("" if debug else "; --debug prints the traceback")


def unwritable(error: OSError, store: Path) -> str:
    """Return why results can't be written to a store, and what to do."""
    place = error.filename2 or error.filename or store  # of a renaming the new name
    return (
        f"can't write to {place} ({error.strerror or error}); finished revisions are kept: remove the cause or give another "
        "--out, and run the same command again"
    )


def unavailable(
    selection: SelectedCheckpoints, checkpoints: Iterable[Checkpoint]
) -> dict[Checkpoint, str]:
    """Return which checkpoints can't be measured because the hub can't be reached, and what the cache lacks of each."""
    if not selection.offline:
        return {}
    cache = repo_dir(selection.suite.source, selection.suite.cache_dir).parent
    lacking = {}
    for checkpoint in checkpoints:
        listing, state = selection.listings.get(checkpoint.name), "is not"
        if listing is not None:
            missing = selection.to_fetch(checkpoint, listing)
            state = f"lacks {', '.join(file.name for file in missing)}" if missing else ""
        if state:
            lacking[checkpoint] = (
                f"{checkpoint.source} at {checkpoint.name} {state} in the cache {cache}; {CONNECT}"
            )
    return lacking


def nothing_cached(selection: SelectedCheckpoints) -> str:
    """Describe that the hub can't be reached and that the cache holds none of the checkpoints."""
    cache = repo_dir(selection.suite.source, selection.suite.cache_dir).parent
    return (
        f"{selection.offline}, and no checkpoint is complete in the cache {cache}; {CONNECT}. --model nano is trained here and "
        "needs no connection"
    )


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
        # From the whole walk: single checkpoints differ in their downloads.
        remaining = (time.perf_counter() - self.started) / self.done * (self.bar.total - self.done)
        left = f"  about {remaining:.0f} s left" if remaining else ""
        self.notify(f"[{self.done}/{self.bar.total}] {line}{left}")
        self.bar.update()

    def downloading(self, name: str, total: int) -> Callable[[int], None]:
        """Start to show a download; return a function that takes the number of bytes as they arrive."""
        bar = tqdm(
            desc=f"fetching {name}",
            total=total,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=self.bar.disable,
        )
        lock, have = threading.Lock(), 0
        started = reported = time.perf_counter()

        def count(arrived: int) -> None:
            nonlocal have, reported
            # Files arrive in several threads.
            with lock:
                have += arrived
                bar.update(arrived)
            if have >= total:
                bar.close()
            now = time.perf_counter()
            if have >= total or (bar.disable and now - reported > INTERVAL):
                reported = now
                self.notify(
                    f"{name}: {size(have)} of {size(total)} fetched, {have / 1e6 / (now - started):.1f} MB/s"
                )

        return count


@contextmanager
def progress(total: int) -> Iterator[WalkProgress]:
    """Show the progress of `total` checkpoints; bars where standard error is a terminal."""
    with tqdm(desc="measuring", total=total, unit=" checkpoints", disable=None) as bar:
        yield WalkProgress(bar)


def print_overview(plan: WalkPlan, missing: int, on: str | None = None) -> None:
    """Print what is measured, on which device or on `on`, and which checkpoints are suspect."""
    selection, measurement = plan.selection, plan.measurement
    count, inputs = len(selection.checkpoints), main_input(measurement.inputs)
    kind = "prompt" if isinstance(inputs[0], str) else "sample"
    print(
        f"{escaped(selection.suite.name)}: {counted(count, 'checkpoint')}, {count - missing} already measured; "
        f"{counted(len(inputs), kind)}, {_measured_at(plan)}; {on or measurement.device}, "
        f"{measurement.settings.dtype}; results in {escaped(str(plan.output.store.path))}",
        flush=True,
    )
    for notice in plan.notices:
        print(f"note: {escaped(notice)}", flush=True)
    if selection.offline:
        print(f"note: {selection.offline}; what the cache holds is measured", flush=True)
    if selection.suspect:
        measured = {checkpoint.step for checkpoint in selection.checkpoints}
        allowed = selection.suspect.keys() <= measured
        action = (
            "measured, and marked as suspect"
            if allowed
            else "left out; --allow_suspect measures them too"
        )
        print(f"{len(selection.suspect)} of the selected revisions are suspect; they are {action}:")
        for step, reason in selection.suspect.items():
            print(f"  step {step:>7}  {reason}", flush=True)


def main_input(inputs: Any) -> Any:
    """Return the prompts or the tensor; of a mapping, in which single numbers and labels may stand too, that of most axes."""
    if isinstance(inputs, Mapping):
        return max(inputs.values(), key=lambda value: getattr(value, "ndim", 0))
    return inputs


def _measured_at(plan: WalkPlan) -> str:
    """Say which tokens are measured: as in the units that there are, or as far as it is known before a model is loaded."""
    measurement = plan.measurement
    stated = plan.output.store.shared("tokens") or measurement.settings.tokens
    if stated or (isinstance(measurement.inputs, list) and not measurement.own_code):
        return at_tokens(stated) if stated else "last token, in text encoders the last word"
    return "class token, or last token of a model without one"


def print_notes(known: "Mapping[int, Known]") -> None:
    """Print which steps have the same weights, and which were measured on other token ids."""
    from tracker.analysis.doubts import other_tokens

    repeats = find_repeats({step: unit.fingerprint for step, unit in known.items()})
    hashes = {step: unit.token_ids_sha256 for step, unit in sorted(known.items())}
    for line in (*(describe_repeat(*steps) for steps in repeats.items()), *other_tokens(hashes)):
        print(f"note: {line}", flush=True)


def headline(known: "Known") -> str:
    """Return the result of a checkpoint in a few words."""
    from tracker.measures.registry import LSS, MEAN_OFFDIAG, MEAN_OFFDIAG_NULL

    row, parts = known.row, []
    if row.miscoupling is not None:
        value, null = row.scalars[MEAN_OFFDIAG], row.scalars[MEAN_OFFDIAG_NULL]
        (tokens,) = known.likeness["tokens"]
        parts.append(
            f"miscoupling {value:.3f} (null {null:.3f}, K={row.miscoupling['k'].values.min()}, {at_tokens(tokens)})"
        )
    if LSS in row.scalars:
        parts.append(f"LSS {row.scalars[LSS]:.2f}")
    return "  ".join(parts) or "measured"
