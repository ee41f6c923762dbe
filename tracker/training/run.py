"""The measurements of one training run, whatever program trains the model.

`CouplingCallback`, `TransformersCallback` and `Watch` translate what their caller says into calls of a `TrainingRun`:

    find(module)  →  start(step, ...)  →  settle_probe(...)  →  reach(step, module, ...) for each step  →  finish()

`Publisher` passes each unit to loggers, the trainer's metrics, the store and the caller; `Skipped` keeps the scheduled steps that
could not be measured or recorded, and why.

A store holds one run, and is continued when the run is resumed. One training at a time writes a store: the process of rank 0
holds a lock until the training has ended.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from tracker.analysis.summary import summary
from tracker.common.errors import UsageError, warn_caller
from tracker.common.files import Lock
from tracker.devices import release_memory
from tracker.loggers.protocol import Log, Logger, Row, check_log, select_metrics
from tracker.measurement import to_dataset
from tracker.measures.options import settings_from
from tracker.measures.settings import OPTIONS, Settings
from tracker.provenance import has_float64, settings_digest
from tracker.store import Store
from tracker.training import probe as probes
from tracker.training import schedule as schedules
from tracker.training.options import split
from tracker.training.probe import Target, contents, find_target, inputs_digest
from tracker.training.ranks import FAILED, LOST, MISTAKE, Failure, Ranks, measure_probe
from tracker.training.schedule import Overhead
from tracker.version import SCHEMA

_held: dict[Path, Lock] = {}  # by store, in this process


def hold(store: Store) -> None:
    """Lock a store for a training. A training of this process that ended in an error does not keep it from the next one.

    Raises:
        UsageError: if a training of another process has it.
        OSError: if the directory can't be written to.
    """
    path = store.path.resolve()
    if path in _held:
        return
    path.mkdir(parents=True, exist_ok=True)
    lock = Lock.take(path / ".training")
    if lock is None:
        raise UsageError(
            f"{store.path} is written by another training ({(path / '.training').read_text()}); choose another save_dir, or "
            "wait until that one has ended and resume it"
        )
    lock.sign()
    _held[path] = lock


def release(store: Store | None) -> None:
    """Unlock a store after a training."""
    if store is not None and (lock := _held.pop(store.path.resolve(), None)):
        lock.release(remove=True)


def _forget() -> None:
    """Leave the locks to the parent process: workers that load data may outlive it."""
    for lock in _held.values():
        os.close(lock.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def open_for_run(
    store: Store | None, settings: Settings, shared: Mapping[str, Any], step: int, resumed: bool
) -> Settings:
    """Claim a store, if there is one; return the settings that continue it.

    Args:
        shared: the settings that all its units share.
        step, resumed: as in `claim`.

    Raises:
        UsageError: if the store can't be used.
    """
    if store is None:
        return settings
    try:
        hold(store)
    except OSError as error:
        raise UsageError(f"save_dir can't be used: {error}") from error
    if refusal := claim(store, shared, step, resumed):
        release(store)
        raise UsageError(refusal)
    return store.continued(settings)


def check_inputs(store: Store | None, probe: Any) -> None:
    """Check that a probe is what the units of a store were measured on.

    Raises:
        UsageError: if it is not.
    """
    if store is None:
        return
    measured = store.shared("inputs_sha256")
    if measured not in (None, inputs_digest(probe)):
        raise UsageError(
            f"{store.path} measured other inputs (SHA-256 {measured[:8]}); give the same probe=, or choose another save_dir"
        )


def claim(store: Store, settings: Mapping[str, Any], step: int, resumed: bool) -> str | None:
    """Prepare a store for a run that starts at `step`: check its settings, set later units aside, forget later skips.

    Returns:
        The reason why the store can't be used, or None.
    """
    steps = store.steps()
    if steps and not resumed:
        return (
            f"{store.path} holds the units of another run (up to step {steps[-1]}); choose another save_dir, or resume that run "
            "from its checkpoint: trainer.fit(..., ckpt_path=...), or in a loop of your own its weights and its step"
        )
    try:
        store.check_settings(settings)
        store.set_aside([later for later in steps if later > step])
        skipped = store.skipped()
        kept = {before: reason for before, reason in skipped.items() if resumed and before <= step}
        if kept != skipped:
            store.write_skipped(kept)
    except (ValueError, OSError) as error:
        return f"save_dir can't be used: {error}"
    return None


class Skipped:
    """Reasons by step, the same on every rank. Each type of error is named in one warning; the store keeps all reasons.

    Args:
        store: where to record them; None: nowhere.
        warns: whether to warn, on one of the ranks.
    """

    def __init__(self, store: Store | None, warns: bool = True) -> None:
        self.store, self.warns = store, warns
        self.reasons: dict[int, str] = {}
        self.warned: set[tuple[str, str]] = set()

    def add(self, step: int, failure: Failure, part: str = "") -> None:
        """Record a step; warn of the first error of its type.

        Args:
            part: what failed after the step was measured, such as "not stored".
        """
        reason = f"{part}: {failure}" if part else str(failure)
        known = self.reasons.get(step, "")
        if reason not in known:
            self.reasons[step] = f"{known}; {reason}" if known else reason
        if (part, failure.kind) not in self.warned:
            self.warned.add((part, failure.kind))
            result = f"is measured but {part}" if part else "is not measured"
            self._warn(f"step {step} {result} ({failure}); training continues")
        if self.store is not None:
            try:
                self.store.write_skipped(self.store.skipped() | {step: self.reasons[step]})
            except (OSError, ValueError) as why:
                self._warn(f"{self.store.path} can't record that step {step} was skipped: {why}")

    def summarize(self) -> None:
        """Warn, at the end of the training, of all steps if more were skipped than were named."""
        if len(self.reasons) > len(self.warned):
            steps, last = ", ".join(map(str, self.reasons)), list(self.reasons.values())[-1]
            self._warn(f"{len(self.reasons)} steps were skipped: {steps} (the last: {last})")

    def _warn(self, message: str) -> None:
        if self.warns:
            warn_caller(message)


COST = ("coupling/seconds", "coupling/share")
SKIPPED = "coupling/skipped"
Metrics = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True)
class Publisher:
    """Sends the units of one training.

    Args:
        loggers: receive the chosen metrics on every rank.
        metrics: receives all finite metrics, on every rank.
        log: which metrics the loggers receive, besides `COST` and `SKIPPED`.
        prefix: of all metrics.
        heatmaps: whether loggers that take pictures receive those of the coupling matrices: on one of the ranks.
        store, on_measure: receive every unit.
    """

    loggers: Sequence[Logger]
    metrics: Metrics | None
    log: Log
    prefix: str
    heatmaps: bool
    store: Store | None
    on_measure: Callable[[xr.Dataset], None] | None

    def row(self, unit: xr.Dataset) -> Row:
        """Return the row of a unit.

        Raises:
            UsageError: if a name in `log` is no metric.
        """
        row = Row.from_unit(unit)
        self._chosen(row)
        return row

    def update_metrics(self, row: Row) -> None:
        """Hand out the metrics; an undefined value would make Lightning's EarlyStopping end the run."""
        if self.metrics is not None:
            self.metrics({self.prefix + name: x for name, x in row.scalars.items() if math.isfinite(x)})

    def store_unit(self, row: Row, unit: xr.Dataset) -> None:
        """Write a unit to the store."""
        if self.store is not None:
            self.store.write(row.step, unit)

    def call(self, row: Row, unit: xr.Dataset) -> None:
        """Call the user's function."""
        if self.on_measure is not None:
            self.on_measure(unit)

    def log_row(self, row: Row, unit: xr.Dataset) -> None:
        """Log the chosen metrics, and the pictures."""
        logged = self._chosen(row)
        for logger in self.loggers:
            if self.heatmaps:
                logger.images(row)
            logger.log(logged)

    def sinks(self) -> dict[str, Callable[..., None]]:
        """Return the places that a unit is sent to, by what to say if one fails."""
        return {"not logged": self.log_row, "not stored": self.store_unit, "on_measure failed": self.call}

    def report_cost(self, step: int, seconds: float, share: float, skipped: int) -> None:
        """Log what a measurement took, and the number of skipped steps once there is one."""
        values = dict(zip(COST, (seconds, share), strict=True)) | ({SKIPPED: skipped} if skipped else {})
        for logger in self.loggers:
            logger.log(Row(step, values, headline=tuple(values)))

    def _chosen(self, row: Row) -> Row:
        """Return the row with the metrics to log."""
        return select_metrics(row, self.log, (*COST, SKIPPED))


class TrainingRun:
    """The schedule, the probe and the results of one training run.

    Args:
        kind: the class that the user sees, whose signature states what it takes.
        given: its options, those of the run (`options`) and those of the measurement.
        every_n_steps, every_n_epochs, probe, weights: as in `CouplingCallback`.

    Raises:
        UsageError, TypeError: for arguments that can't be used.
    """

    def __init__(
        self,
        kind: type,
        keywords: Mapping[str, Any],
        *,
        every_n_steps: int | None,
        every_n_epochs: int | None = None,
        probe: Any,
        weights: str = "raw",
    ):
        options, measuring = split(keywords)
        self.caller = kind.__name__
        self.every_n_epochs = every_n_epochs
        self.schedule = schedules.choose(every_n_steps, options["steps"], every_n_epochs)
        if weights not in ("raw", "averaged"):
            raise UsageError(f"weights={weights!r}; choose 'raw' or 'averaged'")
        self.max_overhead: float | None = options["max_overhead"]
        if self.max_overhead is not None and not 0 < self.max_overhead < 1:
            raise UsageError(
                f"max_overhead={self.max_overhead!r}; give a share of the run's time such as 0.05, or None"
            )
        self.settings = settings_from(measuring, self.caller, signature(kind).parameters)
        self.log = check_log(options["log"])
        self.tokenizer, self.forward = options["tokenizer"], options["forward"]
        self.given_probe = probes.check(probe, self.tokenizer, self.forward)
        self.blocks = options["blocks"]
        self.weights = weights
        self.store = Store(options["save_dir"]) if options["save_dir"] is not None else None
        self.on_measure = options["on_measure"]
        self.regular = every_n_steps is not None or every_n_epochs is not None
        self.prefix = f"{options['name']}/" if options["name"] else ""

        self.probe: Any = None
        self.held_probe: Any = None  # the `contents` of a checkpoint's probe, until it is settled
        self.last_checked = -1  # the schedule has been checked for steps up to this one
        self.last_measured = -1
        self.target: Target | None = None
        # Of the present training:
        self.overhead = Overhead(self.max_overhead)
        self.ranks = Ranks()
        self.open_store: Store | None = None
        self.skipped = Skipped(None)
        self.publisher = self._publisher((), None)
        self.measured = self.settings  # the settings that continue the store

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy, or another process, has of this object: all but the groups, loggers and trainer of a training."""
        apart = {
            "ranks": Ranks(),
            "publisher": self._publisher((), None),
            "probe": None,
            "held_probe": self._probe_contents(),
        }
        return vars(self) | apart

    # What a checkpoint of the training contains.

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"served": self.last_checked, "measured": self.last_measured, "probe": self._probe_contents()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the schedule and the probe from a checkpoint."""
        self.last_checked, self.last_measured = state["served"], state["measured"]
        self.probe, self.held_probe = None, state["probe"]

    def _probe_contents(self) -> Any:
        return self.held_probe if self.probe is None else contents(self.probe)

    def forget(self) -> None:
        """Return to the state before the first step."""
        self.load_state_dict({"served": -1, "measured": -1, "probe": None})

    def resume_at(self, step: int) -> None:
        """Take the state from the store and the step, in a training whose checkpoints do not contain it."""
        if step < self.last_checked or step == 0:
            self.forget()
        if step > 0 and self.last_checked < 0:
            stored = [] if self.store is None else self.store.steps()
            done = self.store is None or step in stored
            self.load_state_dict({"served": step - (not done), "measured": step - (not done), "probe": None})

    # The course of a training.

    def find(self, module: nn.Module) -> None:
        """Find the part of a module to measure, and its blocks.

        Raises:
            UsageError: for a module without residual blocks.
        """
        self.target = find_target(module, self.blocks, self.forward)

    def start(
        self,
        step: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        loggers: Sequence[Logger] = (),
        metrics: Metrics | None = None,
        stores: bool = True,
    ) -> None:
        """Begin, or resume, a training at a step: claim the store. All ranks call this together.

        Args:
            loggers: receive a row for each measured step, on every rank.
            metrics: receives all finite curve points of each measured step, on every rank.
            stores: whether the units are kept in the store.

        Raises:
            UsageError: if the store can't be used.
        """
        self.overhead = Overhead(self.max_overhead)
        self.ranks = Ranks(rank, ranks, self.caller)
        first = rank == 0
        self.open_store = self.store if stores else None
        store = self.open_store if first else None
        self.skipped = Skipped(store, warns=first)
        self.publisher = self._publisher(loggers, metrics, first)
        with isolate_rng():
            shared, resumed = self._identity(), self.last_checked >= 0
            claim = partial(open_for_run, store, self.settings, shared, step, resumed)
            self.measured = self.ranks.broadcast(self.ranks.together(claim, during="opened save_dir", fatal=FAILED))

    def settle_probe(self, take: Callable[[], Any], *arguments: Any) -> None:
        """Choose what is measured: the probe of a checkpoint, else the given one, else samples of a batch.

        Args:
            take: returns a batch, if none is given. An error it raises ends the training.
            arguments: of the function that returns the probe, if one was given.
        """
        probe = self.given_probe
        probe = partial(probe, *arguments) if callable(probe) else probe

        def resolve() -> Any:
            return probes.resolve(probe, self.probe, self.held_probe, take, self.forward)

        together = partial(self.ranks.together, during="took the probe", fatal=FAILED)
        own = together(resolve)
        first = self.ranks.broadcast((probes.inputs_digest(own), contents(own)))
        self.probe = together(probes.as_first, own, *first)
        together(check_inputs, self.open_store, self.probe)

    def reach(
        self,
        step: int,
        module: Callable[[], nn.Module],
        device: torch.device,
        *,
        force: bool = False,
    ) -> xr.Dataset | None:
        """Measure if the schedule includes a step since the last check.

        Args:
            module: returns the module that `find` was given, or a copy of it with other weights.
            device: where to measure; the CPU does it if this has no float64.
            force: measure in any case.

        Returns:
            What was measured, or None.
        """
        due = force or schedules.any_due(self.schedule, self.last_checked, step)
        self.last_checked = step
        if not due or self.last_measured == step:
            return None
        with isolate_rng(), self.overhead:
            unit = self._measure_and_publish(step, module, device)
        cost = self.overhead.last, self.overhead.last_share
        self._attempt(step, "not logged", self.publisher.report_cost, step, *cost, len(self.skipped.reasons))
        if self.regular:  # single intervals of an irregular schedule are not representative
            self.overhead.warn_of_interval()
        return unit

    def finish(self) -> None:
        """End the training: warn of its cost and of skipped steps, and print the summary of the store, if there is one.

        All ranks call this together.
        """
        self.overhead.warn_of_run()
        if self.open_store is not None and self.last_measured >= 0:
            self._attempt(self.last_measured, "not summarised", self._print_summary)
        self.skipped.summarize()
        self.ranks.close()
        release(self.open_store)

    def _print_summary(self) -> None:
        store = self.open_store
        if self.ranks.rank == 0 and store is not None and store.steps():
            with isolate_rng(), suppress(UsageError):  # neither mis-couplings nor paths were asked for
                print(summary(store))
                print(
                    f'stored in {store.path}: tracker.plot("{store.path}"), python -m tracker.report {store.path}',
                    flush=True,
                )

    # Measuring.

    def _measure_and_publish(
        self, step: int, module: Callable[[], nn.Module], device: torch.device
    ) -> xr.Dataset | None:
        """Measure a step and send it everywhere; skip what fails, on all ranks."""
        # At first no training time is lost yet, and later steps would fail too.
        together = partial(self._together, step, fatal=MISTAKE if self.last_measured < 0 else LOST)
        try:
            unit = self._measure(step, module(), device, together)
            row = self._together(step, self.publisher.row, unit, fatal=MISTAKE)
        except Failure as failure:
            self.last_measured = step
            self.skipped.add(step, failure)
            release_memory(device)
            return None
        self.last_measured = step
        self.publisher.update_metrics(row)
        for failed, sink in self.publisher.sinks().items():
            self._attempt(step, failed, sink, row, unit)
        return unit

    def _together(self, step: int, part: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self.ranks.together(part, *arguments, during=f"measured step {step}", **options)

    def _attempt(self, step: int, failed: str, part: Callable[..., Any], *arguments: Any) -> None:
        """Run a part on all ranks; record that it failed if it does on one."""
        try:
            self._together(step, part, *arguments)
        except Failure as failure:
            self.skipped.add(step, failure, failed)

    def _measure(self, step: int, module: nn.Module, device: torch.device, together: Callable[..., Any]) -> xr.Dataset:
        """Return the unit of a step."""
        assert self.target is not None
        started = time.perf_counter()
        model, blocks = self.target.model(module), self.target.blocks
        device = together(_measuring_device, device)
        probe, settings = self.probe, self.measured
        samples = measure_probe(self.ranks, together, model, blocks, probe, self.tokenizer, settings, device)
        unit = together(to_dataset, samples, model, blocks, settings, device, contents(probe), started)
        unit = unit.assign_coords(step=step)
        unit.attrs |= {
            "model_name": unit.attrs["model_name"] or type(module).__name__,
            "weights": self.weights,
            "settings_sha256": settings_digest([self._identity(), unit.attrs["inputs_sha256"]]),
        }
        return unit

    def _identity(self) -> dict[str, Any]:
        """Return the settings that all units of the store share."""
        return {"schema": SCHEMA, **self.settings.identity(list(OPTIONS)), "weights": self.weights}

    def _publisher(self, loggers: Sequence[Logger], metrics: Metrics | None, first: bool = True) -> Publisher:
        store, on_measure = (self.open_store, self.on_measure) if first else (None, None)
        return Publisher(loggers, metrics, self.log, self.prefix, first, store, on_measure)


def _measuring_device(device: torch.device) -> torch.device:
    """Return the device that measures: this one, or the CPU if it has no float64."""
    return device if has_float64(device) else torch.device("cpu")
