"""Walk a suite of training checkpoints: fetch, measure, store and log each, `python -m tracker.pythia --model 12b`.

One unit of results per revision in OUT/units, written completely or not at all; a second run measures only what is missing.
Exit status: 0 all measured; 1 some revision failed, or writing did (what was finished is kept); 2 bad usage; 130
interrupted. No heavy module is imported before the arguments are read.
"""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tracker.common.command_line import (
    FAILED,
    INPUT_ERRORS,
    OK,
    CommandFailure,
    leaving_at_once,
    reports_errors,
)
from tracker.common.errors import CheckpointError, Unreachable, UsageError
from tracker.common.text import UNTRAINED, escaped, first_line, join_names, printable
from tracker.walk.command import Walk, parse
from tracker.walk.display import (
    WalkProgress,
    headline,
    nothing_cached,
    print_notes,
    print_overview,
    progress,
    reason,
    unavailable,
    unwritable,
)
from tracker.walk.plan import Output, WalkPlan, make_plan, store_of
from tracker.walk.prefetch import Prefetched, prefetch

if TYPE_CHECKING:
    import xarray as xr

    from checkpoints.suites import Checkpoint
    from tracker.loggers.protocol import LoggedRun, Opener, Row
    from tracker.skipped import Skipped
    from tracker.walk.units import Units

ALIKE = 3  # so many that fail for one reason, before any is measured, end the walk
KEPT = "finished revisions are kept, and the same command continues with the rest"
RESUME = f"interrupted; {KEPT}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    # SIGTERM, which a cluster sends at the end of a job's time, and SIGHUP, which a closed terminal does, are handled like
    # Ctrl-C: until the walk starts, at once.
    with leaving_at_once(_stops(), RESUME):
        return run(parse(arguments))


@reports_errors(interrupted=RESUME, usage=(UsageError,))
def run(walk: Walk) -> int:
    """Walk the checkpoints, as the command does, and return its exit status.

    From Python, `Walk(files=..., load=..., inputs=...)` takes a function and tensors, and `options` what `tracker.measure` takes.
    """
    from checkpoints.suites import find_files, find_suite
    from tracker.loggers import announce, prepare
    from tracker.loggers.protocol import LoggedRun, parse_log
    from tracker.walk.units import Units

    def notify(line: str) -> None:
        print(line, flush=True)

    with ExitStack() as held:
        try:
            log = parse_log(walk.log)
            # A missing key ends the walk here, before anything is listed or fetched.
            openers = [] if walk.dry_run else prepare(walk.wandb)
            if walk.files:
                suite = find_files(walk.files, walk.revisions, walk.stage)
            else:
                suite = find_suite(
                    walk.model, walk.revisions, walk.stage, walk.module is not None, notify
                )
            logged = LoggedRun(store_of(walk, suite), walk.project, suite.name, {}, log=log)
            announce(openers, logged)
            plan = make_plan(walk, suite, notify)
            if plan.output.held:
                held.callback(plan.output.held.release, remove=True)
            if walk.dry_run:
                return _dry_run(walk, plan)
            units = Units(plan.output.store)
            damaged = units.read(units.store.steps())
        except INPUT_ERRORS as error:
            raise UsageError(str(error)) from error
        for step in damaged:
            file = units.store.file(step)
            print(
                f"note: {file} is damaged and left out; a walk that selects step {step} measures it again, and moves the file to "
                f"{file.parents[1] / 'damaged'}",
                file=sys.stderr,
            )
        with _remembered_interrupts() as interrupts:
            return _walk(walk, plan, units, openers, logged, interrupts)


def _walk(
    walk: Walk,
    plan: WalkPlan,
    units: "Units",
    openers: "Sequence[Opener]",
    logged: "LoggedRun",
    interrupts: Sequence[int],
) -> int:
    from checkpoints import copies, nano
    from tracker.loggers import opened
    from tracker.netcdf import DamagedFile
    from tracker.skipped import Skipped

    selection, measurement, store = plan.selection, plan.measurement, plan.output.store
    missing = [
        checkpoint for checkpoint in selection.checkpoints if checkpoint.step not in units.known
    ]
    skipped = Skipped(store, partial(print, file=sys.stderr))
    lacking = unavailable(selection, missing)
    if lacking and len(lacking) == len(missing) and not units.known:
        raise CommandFailure(nothing_cached(selection))
    print_overview(plan, len(missing))
    for checkpoint, lacks in lacking.items():
        skipped.add(checkpoint.step, lacks)
    missing = [checkpoint for checkpoint in missing if checkpoint not in lacking]
    try:
        copies.sweep(
            Path(checkpoint.source)
            for checkpoint in selection.checkpoints
            if checkpoint.revision is None
        )
        _check_selection(plan, units)
        if walk.model == "nano" and missing and not nano.is_trained():
            nano.train()
        dtype, device = measurement.settings.dtype, str(measurement.device)
        inputs = (
            {"prompts": walk.prompts}
            if walk.inputs is None
            else {"inputs": measurement.inputs_digest}
        )
        config = {"model": selection.suite.source, **inputs, "dtype": dtype, "device": device}
        with opened(openers, replace(logged, config=config)) as log:
            with progress(len(missing)) as shown:
                for step in list(units.known):
                    _rescore(plan.output, units, step)
                    log(units.known[step].row)
                _measure_missing(plan, missing, units, skipped, shown, log, interrupts, walk.debug)
            print_notes(units.known)
            # Before the loggers finish: a server may keep them waiting
            no_page = _write_page(units)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandFailure(unwritable(error, store.path)) from error
    except DamagedFile as error:  # since the walk has read or written it
        raise CommandFailure(str(error)) from error
    lines = [*(f"failed: {line}" for line in skipped.lines()), *no_page]
    for line in lines:
        print(line, file=sys.stderr)
    return FAILED if lines else OK


def _dry_run(walk: Walk, plan: WalkPlan) -> int:
    """Print what the walk would take."""
    from tracker.walk.dry_run import describe

    missing = [
        checkpoint
        for checkpoint in plan.selection.checkpoints
        if not plan.output.store.has(checkpoint.step)
    ]
    print_overview(plan, len(missing), walk.on)
    for line in describe(plan, missing, walk):
        print(line, flush=True)
    return OK


@contextmanager
def _remembered_interrupts() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt on each signal that ends a walk, and collect the signals in a list.

    A KeyboardInterrupt raised in the wrong place (a destructor, a callback from C) is swallowed; the list is not.
    """
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    # Python gives other threads no signals
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, stop) for number in _stops()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _stops() -> list[int]:
    """Return the signals that end a walk: SIGHUP unless it is ignored, as after `nohup`."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


def _check_selection(plan: WalkPlan, units: "Units") -> None:
    """Refuse a store of other weights, and a walk without checkpoints.

    Raises:
        UsageError: stating what to do.
    """
    selection, store = plan.selection, plan.output.store
    if other := units.changed(selection):
        raise UsageError(
            f"the weights of step {join_names(other)} of {selection.suite.source} are not those that {store.path} holds "
            "results of: retrained, or published again? Choose another --out, or delete the units of these steps"
        )
    if not selection.checkpoints:
        raise UsageError(
            "every selected checkpoint is suspect; --allow_suspect measures and marks them"
        )


def _measure_missing(
    plan: WalkPlan,
    missing: "Sequence[Checkpoint]",
    units: "Units",
    skipped: "Skipped",
    shown: WalkProgress,
    log: "Callable[[Row], None]",
    interrupts: Sequence[int],
    debug: bool,
) -> None:
    """Measure the missing checkpoints into the store; skip those that fail."""
    from tracker.devices import is_device_error, release_memory

    def measured_elsewhere(step: int) -> bool:
        units.read([step])
        if step not in units.known:  # its file is damaged
            return False
        log(units.known[step].row)
        shown.advance(f"step {step}: measured by another walk")
        return True

    coming = prefetch(
        plan.selection, plan.disk, plan.output.store, missing, shown, measured_elsewhere
    )
    with closing(coming):
        for prefetched in coming:
            if interrupts:
                raise KeyboardInterrupt
            checkpoint, started, prepared = prefetched.checkpoint, time.perf_counter(), None
            try:
                prepared = units.prepare(_measured(plan, prefetched))
            # Whatever is wrong with this revision, the others are measured
            except Exception as error:
                if is_device_error(error):
                    raise CommandFailure(
                        f"step {checkpoint.step}: the device failed ({first_line(error)}), and this process can't use it any "
                        f"more; {KEPT}"
                    ) from error
                if debug:
                    traceback.print_exception(error)
                why = printable(reason(error, debug))
                before = skipped.add(checkpoint.step, why)
                same = why if before is None else f"for the same reason as step {before}"
                shown.advance(f"step {checkpoint.step}: FAILED, {same}")
                if not units.known and skipped.alike(min(ALIKE, len(missing))):
                    # With these options, or this program, no revision can be measured.
                    if isinstance(error, UsageError):
                        raise
                    # A hub that can't be reached may come back.
                    if len(missing) > ALIKE and not isinstance(error, Unreachable):
                        raise CommandFailure(
                            f"the first {ALIKE} checkpoints fail alike, and the walk ends; --steps selects others: {why}"
                        ) from error
            if prepared is None:
                # The weights of a revision that failed leave too little for the next.
                release_memory(plan.measurement.device)
                continue
            units.add(checkpoint.step, *prepared)
            del prepared  # frees memory before the next is measured
            known = units.known[checkpoint.step]
            log(known.row)
            shown.advance(
                f"step {checkpoint.step}: {headline(known)}  ({time.perf_counter() - started:.1f} s)"
            )


def _measured(plan: WalkPlan, prefetched: Prefetched) -> "xr.Dataset":
    """Measure a fetched checkpoint; where it can't be loaded, once more if files of it were damaged and are downloaded again."""
    from tracker.walk.units import measure_checkpoint

    directory = prefetched.arrival.result()
    try:
        return measure_checkpoint(plan, prefetched.checkpoint, directory)
    except CheckpointError:
        if not prefetched.fetch_damaged_again():
            raise
    # Not in the handler, whose traceback holds what was loaded
    return measure_checkpoint(plan, prefetched.checkpoint, directory)


def _write_page(units: "Units") -> list[str]:
    """Write the page and print the summary; return why there is none, in no line or one."""
    from tracker.analysis.reduction import read_reduced
    from tracker.analysis.summary import summary_of_reduced
    from tracker.provenance import settings_digest
    from tracker.report.write import write_page

    store = units.store
    if not units.known:
        return []

    def leave_out(step: int, error: OSError | ValueError) -> None:
        # Those damaged at the start were named there
        if step in units.known and isinstance(error, ValueError):
            raise error

    with store.alone():
        store.remove_abandoned()  # claims on steps that were finished before their walk was killed
        try:
            digests = set().union(*(known.likeness["settings"] for known in units.known.values()))
            if settings_digest(store.read_settings()) not in digests:
                return [
                    f"no page: {store.settings} was changed after these results were measured, and does not say how; restore "
                    "it, or measure into another --out"
                ]
            curve = read_reduced(store.path, leave_out)
            page = write_page({store.path: curve}, store.path / "report.html")
        except ValueError as error:  # a unit of another walk, or settings that cannot be read
            return [f"no page: {error}"]
    print(f"page: {escaped(str(page))}", flush=True)
    with suppress(UsageError):  # neither mis-couplings nor paths were asked for
        print(summary_of_reduced({"": curve}), flush=True)
    return []


def _rescore(output: Output, units: "Units", step: int) -> None:
    """Add the scores given to this walk to a unit of an earlier one."""
    from tracker.walk.units import with_scores

    scored, known = output.scores.get(step, {}), units.known[step]
    named = {f"score/{task}": value for task, value in scored.items()}
    if known.revision.startswith(UNTRAINED) or named.items() <= known.row.scalars.items():
        return
    claim = output.store.wait(step)  # a walk that was given other scores may be adding them
    # Read under the claim, so that scores which another walk has added stay
    try:
        units.add(
            step, *units.prepare(with_scores(output.store.read(step), scored, output.scores_from))
        )
    finally:
        claim.release(remove=True)


if __name__ == "__main__":
    sys.exit(main())
