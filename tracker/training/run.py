"""The measurements of one training run, whatever program trains the model.

`CouplingCallback`, `TransformersCallback` and `Watch` translate what their caller says into calls of a `TrainingRun`:

    find(module)  →  start(step, ...)  →  settle_probe(...)  →  reach(step, module, ...) for each step  →  finish(), or fail()

`begin` is the first three, where the program's checkpoints do not contain the state of this.

Each unit goes to the loggers, the trainer's metrics, the store and the caller's function. A scheduled step that can't be
measured, or not be recorded in one of these places, is skipped there, and the training continues.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from shlex import quote
from typing import Any

import torch
import xarray as xr
from torch import nn
from torch.distributed.tensor import DTensor

from tracker.analysis.summary import summary
from tracker.common.errors import UsageError, warn_caller, warning_once
from tracker.common.text import escaped
from tracker.devices import release_memory
from tracker.loggers.protocol import Logger, Row, check_log, select_metrics
from tracker.measurement import measure_with_less_memory, prepared, to_dataset
from tracker.measures.dataset import Sample
from tracker.measures.options import settings_from
from tracker.measures.settings import OPTIONS
from tracker.model.proposals import BlocksNotFound
from tracker.model.random_numbers import preserve_random_state
from tracker.model.weights import check_whole, fails_in_forward, noting_forward
from tracker.model.wrappers import unwrap
from tracker.provenance import has_float64, settings_digest
from tracker.skipped import Skipped
from tracker.store import Store
from tracker.training import probe as probes
from tracker.training import schedule as schedules
from tracker.training.claim import Held, check_claim, check_inputs, open_for_run
from tracker.training.options import split
from tracker.training.probe import Target, find_target, plain
from tracker.training.ranks import FAILED, LOST, MISTAKE, Failure, Ranks
from tracker.training.schedule import Overhead
from tracker.version import SCHEMA

COST = ("cost/seconds", "cost/share")
SKIPPED = "diagnostics/skipped"
Metrics = Callable[[Mapping[str, float]], None]


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
        self.last_checked = -1  # the schedule has been checked for steps up to this one
        self.last_measured = -1
        self.continues = False  # whether it has measured a step in an earlier training
        self.target: Target | None = None
        # Of the present training:
        self.overhead = Overhead(self.max_overhead)
        self.ranks = Ranks()
        self.open_store: Store | None = None
        self.held: Held | None = None  # on rank 0, until the training has ended
        self.skipped = Skipped(None, warn_caller)
        self.said: set[str] = set()  # warnings of its measurements
        self.any_tried = self.any_measured = False
        self.loggers: Sequence[Logger] = ()
        self.metrics: Metrics | None = None
        self.measured = self.settings  # the settings that continue the store

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy, or another process, has of this object: all but the groups, loggers and models of a training."""
        apart = {
            "ranks": Ranks(),
            "loggers": (),
            "metrics": None,
            "held": None,
        }
        return vars(self) | apart

    # What a checkpoint of the training contains.

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            "served": self.last_checked,
            "measured": self.last_measured,
            "probe": self.probe,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the schedule and the probe from a checkpoint."""
        self.last_checked, self.last_measured = state["served"], state["measured"]
        self.continues = self.last_measured >= 0
        self.probe = state["probe"]

    def forget(self) -> None:
        """Return to the state before the first step."""
        self.load_state_dict({"served": -1, "measured": -1, "probe": None})

    def _resume_at(self, step: int) -> None:
        """Take the state from the store and the step."""
        if step < self.last_checked or step == 0:
            self.forget()
        if step > 0 and self.last_checked < 0:
            stored = [] if self.store is None else self.store.steps()
            # A loop that saved its weights before it called `watch` has not measured this step.
            done = self.store is None or step in stored
            self.load_state_dict(
                {"served": step - (not done), "measured": step - (not done), "probe": None}
            )
            self.continues = bool(stored)

    # The course of a training.

    def begin(
        self,
        step: int,
        model: nn.Module,
        device: torch.device,
        *,
        rank: int,
        ranks: int,
        loggers: Sequence[Logger],
        take: Callable[[], Any] | None = None,
    ) -> None:
        """Begin, or resume, a training whose checkpoints do not contain the state of this: `find`, `start` and `settle_probe`.

        Args:
            take: returns a batch, if no probe is given.
        """
        check_whole(model)
        self.find(model, device, model, take=take)
        self._resume_at(step)
        self.start(step, rank=rank, ranks=ranks, loggers=loggers)
        self.settle_probe(take, model)

    def find(
        self,
        module: nn.Module,
        device: torch.device,
        *arguments: Any,
        take: Callable[[], Any] | None = None,
    ) -> None:
        """Find the part of a module to measure, and its blocks; by a forward pass where the module tree does not show them.

        Args:
            device: where the pass runs, as in `reach`.
            arguments: of the function that returns the probe, if one was given.
            take: returns a batch for the pass, if no probe is given. None: there is none yet.

        Raises:
            UsageError: for a module without residual blocks.
        """
        try:
            self.target = find_target(module, self.blocks, self.forward)
        except BlocksNotFound:
            # A function of the probe may need arguments that are not there yet.
            known = self.given_probe is not None and (arguments or not callable(self.given_probe))
            if self.forward is not None or not probes.runs(unwrap(module)) or not (known or take):
                raise
            with preserve_random_state():
                batch = self._given(*arguments)() if known else take()  # type: ignore[reportOptionalCall]
                calls = probes.forward_calls(unwrap(module), plain(batch), self.tokenizer)
                device = _measuring_device(device)
                with prepared(unwrap(module), self.blocks, calls, self.settings, device) as replica:
                    self.target = Target("", None, replica.description)

    def _given(self, *arguments: Any) -> Callable[[], Any]:
        """Return the function of no arguments that returns the given probe."""
        probe = self.given_probe
        return partial(probe, *arguments) if callable(probe) else lambda: probe

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
        self.open_store = self.store if stores else None
        store = self.open_store if rank == 0 else None
        self.skipped = Skipped(store, warn_caller)
        self.said = set()
        self.any_tried = self.any_measured = False
        self.loggers, self.metrics = loggers, metrics
        with preserve_random_state():
            shared, resumed = self._identity(), self.last_checked >= 0
            claim = partial(open_for_run, store, self.settings, shared, step, resumed, self)
            settings, self.held = self.ranks.together(claim, during="opened save_dir", fatal=FAILED)
            self.measured = self.ranks.broadcast(settings)

    def settle_probe(self, take: Callable[[], Any] | None, *arguments: Any) -> None:
        """Choose what is measured: the probe of a checkpoint, else the given one, else samples of a batch.

        Args:
            take: returns a batch, if none is given. An error it raises ends the training.
            arguments: of the function that returns the probe, if one was given.
        """
        given = self._given(*arguments)

        def resolve() -> Any:
            # The function, the data or their collator may draw numbers.
            with preserve_random_state():
                return probes.resolve(given(), self.probe, take)

        together = partial(self.ranks.together, during="took the probe", fatal=FAILED)
        self.probe = self.ranks.broadcast(together(resolve))
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
        with preserve_random_state():
            with self.overhead:
                unit = self._measure_and_publish(step, module, device)
            self._attempt(step, "not logged", self._log_cost, step)
        if self.regular:  # where many steps are measured at first, the share falls later
            self.overhead.warn()
        return unit

    def finish(self) -> None:
        """End the training: warn of its cost and of skipped steps, and print the summary of the store, if there is one.

        All ranks call this together.
        """
        self.overhead.warn(ended=True)
        if self.open_store is not None and self.last_measured >= 0:
            self._attempt(self.last_measured, "not summarised", self._print_summary)
        if self.ranks.rank == 0 and (lines := self.skipped.lines()):
            found = self._has_results()
            if len(self.skipped.reasons) > len(lines) or not found:
                warn_caller(
                    f"{'' if found else 'this run has no results; '}skipped: {'; '.join(lines)}"
                )
        self.ranks.close()
        self.leave()

    def leave(self) -> None:
        """Give the store up: the training has ended, maybe because the user has stopped it."""
        if self.held is not None:
            self.held.lock.release(remove=True)
        self.held = None

    def fail(self) -> None:
        """Note that the training has ended in an error: one that follows in this process may be the same run once more."""
        if self.held is not None:
            self.held.failed = True

    def _print_summary(self) -> None:
        store = self.open_store
        if self.ranks.rank == 0 and store is not None and store.steps():
            # Neither mis-couplings nor paths were asked for
            with preserve_random_state(), suppress(UsageError):
                path = str(store.path)
                print(summary(store))
                line = f"stored in {path}: tracker.plot({path!r}), python -m tracker.report {quote(path)}"
                print(escaped(line), flush=True)

    # Measuring.

    def _measure_and_publish(
        self, step: int, module: Callable[[], nn.Module], device: torch.device
    ) -> xr.Dataset | None:
        """Measure a step and send it everywhere; skip what fails, on all ranks."""
        # At first no training time is lost yet, and later steps would fail too.
        together = partial(self._together, step, fatal=MISTAKE if self._is_first else LOST)
        try:
            with warning_once(self.said):
                unit = self._measure(step, module(), device, together)
            row = self._together(step, self._row, unit, fatal=MISTAKE)
        except Failure as failure:
            self.last_measured, self.any_tried = step, True
            self._skip(step, str(failure), f"step {step} is not measured ({failure})")
            release_memory(device)
            return None
        self.last_measured, self.any_tried, self.any_measured = step, True, True
        self._together(step, check_claim, self.held, fatal=MISTAKE)
        # The store first: units are what can't be had again, and all else is derived from them.
        self._attempt(step, "not stored", self._store, step, unit)
        if self.metrics is not None and row is not None:
            # An undefined value would make Lightning's EarlyStopping end the run.
            self.metrics(
                {
                    self.prefix + name: value
                    for name, value in row.scalars.items()
                    if math.isfinite(value)
                }
            )
        self._attempt(step, "not logged", self._log, row)
        self._attempt(step, "on_measure failed", self._pass_on, unit)
        return unit

    def _together(
        self, step: int, part: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        return self.ranks.together(part, *arguments, during=f"measured step {step}", **options)

    def _attempt(self, step: int, failed: str, part: Callable[..., Any], *arguments: Any) -> None:
        """Run a part on all ranks; record that it failed if it does on one."""
        try:
            self._together(step, part, *arguments)
        except Failure as failure:
            self._skip(
                step, f"{failed}: {failure}", f"step {step} is measured but {failed} ({failure})"
            )

    def _skip(self, step: int, reason: str, warning: str) -> None:
        """Record why a step has no results, or not everywhere; warn if it is the first for this cause."""
        if self.skipped.add(step, reason) is None and self.ranks.rank == 0:
            warn_caller(
                f"{warning}; {'' if self._has_results() else 'no step has results yet; '}training continues"
            )

    def _has_results(self) -> bool:
        """Whether the store has a unit; without a store, whether a step was measured."""
        return self.any_measured if self.open_store is None else bool(self.open_store.steps())

    # Where results go.

    def _row(self, unit: xr.Dataset) -> Row | None:
        """Return the row of a unit; None if nothing on this rank takes it.

        Raises:
            UsageError: if a name in `log` is no metric.
        """
        # Names are checked where nothing is logged, too.
        if self.metrics is None and not self.loggers and isinstance(self.log, str):
            return None
        row = Row.from_unit(unit)
        self._chosen(row)
        return row

    def _chosen(self, row: Row) -> Row:
        """Return the row with the metrics to log."""
        return select_metrics(row, self.log, (*COST, SKIPPED))

    def _log(self, row: Row | None) -> None:
        """Log the chosen metrics, and the pictures."""
        if row is None:
            return
        logged = self._chosen(row)
        for logger in self.loggers:
            if self.ranks.rank == 0:
                logger.images(row)
            logger.log(logged)

    def _log_cost(self, step: int) -> None:
        """Log what a measurement took, and the number of skipped steps once there is one."""
        values: dict[str, float] = dict(
            zip(COST, (self.overhead.last, self.overhead.last_share), strict=True)
        )
        if self.skipped.reasons:
            values[SKIPPED] = len(self.skipped.reasons)
        for logger in self.loggers:
            logger.log(Row(step, values, headline=tuple(values)))

    def _store(self, step: int, unit: xr.Dataset) -> None:
        if self.open_store is not None and self.ranks.rank == 0:
            self.open_store.write(step, unit)

    def _pass_on(self, unit: xr.Dataset) -> None:
        if self.on_measure is not None and self.ranks.rank == 0:
            self.on_measure(unit)

    def _measure(
        self, step: int, module: nn.Module, device: torch.device, together: Callable[..., Any]
    ) -> xr.Dataset:
        """Return the unit of a step."""
        assert self.target is not None
        started = time.perf_counter()
        model, blocks = self.target.model(module), self.target.blocks
        device = together(_measuring_device, device)
        # All ranks gather sharded weights together, block by block: each measures all samples.
        shared = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        samples = together(self._samples, model, device, shared, gathers=not shared)
        if shared:
            samples = probes.interleave(self.ranks.gather(samples))
        unit = together(
            to_dataset, samples, model, blocks, self.measured, device, self.probe, started
        )
        unit = unit.assign_coords(step=step)
        unit.attrs |= {
            "model_name": unit.attrs["model_name"] or type(module).__name__,
            "weights": self.weights,
            "settings_sha256": settings_digest([self._identity(), unit.attrs["inputs_sha256"]]),
        }
        return unit

    def _samples(self, model: nn.Module, device: torch.device, shared: bool) -> list[Sample]:
        """Measure this rank's samples of the probe: every n-th, if n ranks share it.

        Raises:
            UsageError: if the first forward pass of the run fails, because each later one would fail in the same way.
        """
        assert self.target is not None
        own = self.probe
        if shared and self.ranks.rank >= probes.sample_count(own):
            return []
        if shared:
            own = probes.select_samples(own, slice(self.ranks.rank, None, self.ranks.count))
        try:
            with noting_forward(type(model).__name__):  # the tokenizer's errors, too
                calls = probes.forward_calls(model, own, self.tokenizer)
            return measure_with_less_memory(model, self.target.blocks, calls, self.measured, device)
        except Exception as error:
            if self._is_first and fails_in_forward(error):
                raise UsageError(probes.refusal(model, self.probe, error)) from error
            raise

    @property
    def _is_first(self) -> bool:
        """Whether no step has been measured, or tried; the training may have begun at any step."""
        return not (self.any_tried or self.continues)

    def _identity(self) -> dict[str, Any]:
        """Return the settings that all units of the store share."""
        return {"schema": SCHEMA, **self.settings.identity(list(OPTIONS)), "weights": self.weights}


def _measuring_device(device: torch.device) -> torch.device:
    """Return the device that measures: this one, or the CPU if it has no float64."""
    return device if has_float64(device) else torch.device("cpu")
