"""CouplingCallback: measure a model while it trains, without changing the training.

    Trainer(callbacks=[CouplingCallback(every_n_steps=500, save_dir="results/run")])

Measurements run on a replica (`tracker.measurement`) on the training device, outside autocast and in float32, and restore
the random state. Step s is the state after s optimizer steps.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from typing import Any, Literal, Unpack

import xarray as xr
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from tracker.blocks.find import Named
from tracker.errors import UsageError
from tracker.loggers.lightning import LightningAdapter
from tracker.measurement import to_dataset
from tracker.measures.options import accepts_options, documented, settings_from
from tracker.measures.settings import Options
from tracker.notices import warn_caller
from tracker.provenance import settings_digest
from tracker.results import Store
from tracker.training import probe as probes
from tracker.training import run_store
from tracker.training import schedule as schedules
from tracker.training.averaging import check_readable, measured_module, replaces_raw_weights
from tracker.training.measurement import measure_probe, measuring_device
from tracker.training.overhead import Overhead
from tracker.training.publisher import Log, Publisher, checked
from tracker.training.ranks import FAILED, LOST, MISTAKE, Failure, Ranks
from tracker.training.skipped import Skipped
from tracker.training.target import Forward, Target, find_target


class CouplingCallback(Callback):
    """Measure block coupling, line-shape score and expodistance at chosen steps of any Lightning run.

    The training is bit for bit the same as without the callback. About a dozen headline numbers go to every logger of the
    run (`log`); all go to `trainer.callback_metrics` (`coupling/mean_offdiag` and the rest, for EarlyStopping or
    ModelCheckpoint), and with `save_dir` to a store that `tracker.open_results` and `python -m tracker.report` can read
    during the training.
    Under DDP the ranks share the probe's samples; with sharded weights (ModelParallelStrategy) each rank measures all.

    If memory runs out, the callback tries again with half the memory budget and with a quarter. It skips a measurement
    that still runs out or fails, on all ranks, with a warning; `skipped.reasons`, the store and its page name these steps.
    An error of the device itself ends the training. On devices without float64 (MPS), the CPU measures.

    Args:
        every_n_steps: measure at steps 0, n, 2n and so on. Without any schedule: 0, 1, 2, 4, 8 and so on.
        every_n_epochs: measure at the end of every n-th epoch.
        steps: measure at these steps.
        schedule: "log2", "pythia" (the steps of its published checkpoints), or a function step -> bool.
        ends: measure also before the first step and after the last.
        probe: the samples to measure: prompts (with `tokenizer`), a tensor or mapping that the model's forward takes, a
            training batch, or a function (trainer, module) -> any of these. None: the first validation batch of the
            sanity check; without one, the first training batch. Checkpoints contain the probe.
        max_samples: how many samples to measure of a batch taken from the run; a given probe is measured whole.
        forward: runs a batch, forward(module, batch), for modules whose own forward does not take it.
        blocks: as in `tracker.measure`, with names as in the LightningModule.
        weights: "raw", or "averaged": the weights of the run's WeightAveraging callback, listed before this one.
        save_dir: directory of the store, for one run: a new run is refused, a resumed one continues.
        log: "headline", the numbers that docs/training.md lists; "all", about 170 with the default measures; or a list of
            metrics, with * for any characters.
        heatmaps: send pictures of the coupling matrices to loggers that take them (W&B, TensorBoard).
        on_measure: called on rank 0 with every unit, a Dataset as from `tracker.measure` with its `step`. If it raises, a
            warning says so, and the training continues.
        max_overhead: the share of the run's time above which a warning states, once, that measuring takes too long.
            None: never.
        thin: instead of the warning, skip scheduled steps (never the ends) that would raise the share above
            `max_overhead`.
        name: prefix of all metrics, to distinguish several of these callbacks in one run.
        **options: measurement options.

    Raises:
        UsageError: for bad settings, immediately; for a module without residual blocks, at setup; for a batch that the
            model does not take, before the first step.
    """

    @accepts_options
    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        every_n_epochs: int | None = None,
        steps: Iterable[int] | None = None,
        schedule: Literal["log2", "pythia"] | schedules.Schedule | None = None,
        ends: bool = True,
        probe: Any = None,
        tokenizer: Any = None,
        max_samples: int = 8,
        forward: Forward | None = None,
        blocks: Named | None = None,
        weights: Literal["raw", "averaged"] = "raw",
        save_dir: str | None = None,
        log: Log = "headline",
        heatmaps: bool = True,
        on_measure: Callable[[xr.Dataset], None] | None = None,
        max_overhead: float | None = 0.05,
        thin: bool = False,
        name: str = "",
        **options: Unpack[Options],
    ):
        self.schedule = schedules.choose(every_n_steps, steps, schedule, every_n_epochs)
        if weights not in ("raw", "averaged"):
            raise UsageError(f"weights={weights!r}; choose 'raw' or 'averaged'")
        if max_overhead is not None and not 0 < max_overhead < 1:
            raise UsageError(f"max_overhead={max_overhead!r}; give a share of the run's time such as 0.05, or None")
        if thin and max_overhead is None:
            raise UsageError("thin=True needs a share to keep to: max_overhead=0.05")
        self.settings = settings_from(options, "CouplingCallback", signature(CouplingCallback).parameters)
        self.logged = checked(log)  # Lightning replaces an attribute `log`
        self.every_n_epochs = every_n_epochs
        self.ends = ends
        self.given_probe = probes.check(probe, tokenizer, forward)
        self.tokenizer = tokenizer
        self.max_samples = schedules.positive("max_samples", max_samples)
        self.forward = forward
        self.blocks = blocks
        self.weights = weights
        self.store = Store(save_dir) if save_dir is not None else None
        self.heatmaps = heatmaps
        self.on_measure = on_measure
        self.max_overhead = max_overhead
        self.thin = thin
        self.regular = every_n_steps is not None or every_n_epochs is not None
        self.name = name
        self.prefix = f"{name}/" if name else ""

        self.probe: Any = None
        self.last_checked = -1  # the schedule has been checked for steps up to this one
        self.last_measured = -1
        self.target: Target | None = None
        # Of the present fit:
        self.first_batch_seen = False
        self.overhead = Overhead(max_overhead)
        self.ranks = Ranks()
        self.skipped = Skipped(None)
        self.publisher = self._publisher(())

    # The hooks, in the order in which Lightning calls them.

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint, different for each name and choice of weights."""
        return self._generate_state_key(name=self.name, weights=self.weights)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the blocks early, unless the module builds them later."""
        self.target = None
        if trainer.global_step < self.last_checked:  # left from another run; a checkpoint's state is loaded after setup
            self.last_checked, self.last_measured, self.probe = -1, -1, None
        if stage == "fit" and not is_overridden("configure_model", pl_module):
            self.target = find_target(pl_module, self.blocks, self.forward)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the blocks of a module that built them after setup; refuse weights that can't be read."""
        if self.target is None:
            self.target = find_target(pl_module, self.blocks, self.forward)
        check_readable(self, trainer, pl_module, self.weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the probe from a checkpoint."""
        self.last_checked, self.last_measured = state_dict["served"], state_dict["measured"]
        self.probe = state_dict["probe"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"served": self.last_checked, "measured": self.last_measured, "probe": self.probe}

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take the probe from the first validation batch of the sanity check, which needs no extra loading."""
        if trainer.sanity_checking and self.probe is None and self.given_probe is None:
            self.probe = probes.first_samples(batch, self.max_samples)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Claim the store for this run."""
        self.first_batch_seen = False
        self.overhead = Overhead(self.max_overhead)
        self.ranks = Ranks(trainer.global_rank, trainer.world_size)
        self.skipped = Skipped(self.store if trainer.is_global_zero else None, warns=trainer.is_global_zero)
        self.publisher = self._publisher([LightningAdapter(logger, self.prefix) for logger in trainer.loggers])
        store, now = self.store if trainer.is_global_zero else None, (trainer.global_step, self.last_checked >= 0)
        with isolate_rng():
            claim = partial(run_store.open_for_run, store, self.settings, self._identity(), *now)
            opened = self.ranks.together(claim, during="opened save_dir", fatal=FAILED)
        self.measured = trainer.strategy.broadcast(opened)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure before the first step, and at the step of a checkpoint that was saved before it was measured."""
        if not self.first_batch_seen:
            self.first_batch_seen = True
            given = self.given_probe
            given = partial(given, trainer, pl_module) if callable(given) else given
            resolve = partial(probes.resolve, given, self.probe, batch, self.max_samples)
            self.probe = trainer.strategy.broadcast(self.ranks.together(resolve, during="took the probe", fatal=FAILED))
        if self.last_checked < trainer.global_step:
            self._measure_if_due(trainer, pl_module, force=self.ends and self.last_checked < 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure if the schedule includes an optimizer step of this batch."""
        n = self.every_n_epochs
        end_of_nth = n is not None and trainer.is_last_batch and (trainer.current_epoch + 1) % n == 0
        if self.last_checked < trainer.global_step or end_of_nth:
            self._measure_if_due(trainer, pl_module, force=end_of_nth)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after the last step."""
        if self.ends and 0 <= self.last_measured < trainer.global_step:
            if self.weights == "raw" and replaces_raw_weights(self, trainer):
                warn_caller(
                    "the last step is not measured: averaged weights have replaced the raw ones; list CouplingCallback "
                    "before the averaging callback"
                )
            else:
                self._measure_if_due(trainer, pl_module, force=True, thin=False)
        if not self.regular:  # single intervals of an irregular schedule are not representative
            self.overhead.warn_above_limit(self.overhead.share, "this run")
        self.skipped.summarize()
        self.ranks.close()

    def _publisher(self, loggers: Sequence[LightningAdapter]) -> Publisher:
        return Publisher(loggers, self.logged, self.prefix, self.heatmaps, self.store, self.on_measure)

    # Measuring.

    def _measure_if_due(self, trainer: Trainer, module: LightningModule, force: bool, thin: bool = True) -> None:
        """Measure if `force`, or if the schedule includes a step since the last check, unless thinning skips it."""
        step = trainer.global_step
        due = force or schedules.any_due(self.schedule, self.last_checked, step)
        if due and thin and self.thin and self.last_measured >= 0:
            due = trainer.strategy.broadcast(self.overhead.allows_another())  # by the clock of one rank
        self.last_checked = step
        if not due or self.last_measured == step:
            return
        with isolate_rng(), self.overhead:
            self._measure_and_publish(trainer, module, step)
        cost = self.overhead.last, self.overhead.last_share
        self._attempt(step, "not logged", self.publisher.report_cost, step, *cost, len(self.skipped.reasons))
        if self.regular and not self.thin:
            self.overhead.warn_above_limit(self.overhead.last_share, "the time since the last measurement")

    def _measure_and_publish(self, trainer: Trainer, module: LightningModule, step: int) -> None:
        """Measure a step and send it everywhere; skip what fails, on all ranks."""
        # At first no training time is lost yet, and later steps would fail too.
        together = partial(self._together, step, fatal=MISTAKE if self.last_measured < 0 else LOST)
        try:
            unit = self._measure(trainer, module, together)
            row = self._together(step, self.publisher.row, unit, fatal=MISTAKE)
        except Failure as failure:
            self.last_measured = step
            return self.skipped.add(step, failure)
        self.last_measured = step
        self.publisher.update_metrics(trainer, row)
        for failed, sink in self.publisher.sinks().items():
            self._attempt(step, failed, sink, trainer, row, unit)

    def _together(self, step: int, part: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self.ranks.together(part, *arguments, during=f"measured step {step}", **options)

    def _attempt(self, step: int, failed: str, part: Callable[..., Any], *arguments: Any) -> None:
        """Run a part on all ranks; record that it failed if it does on one."""
        try:
            self._together(step, part, *arguments)
        except Failure as failure:
            self.skipped.add(step, failure, failed)

    def _measure(self, trainer: Trainer, module: LightningModule, together: Callable[..., Any]) -> xr.Dataset:
        """Return the unit of the present step."""
        assert self.target is not None
        started = time.perf_counter()
        model = self.target.model(measured_module(self, trainer, module, self.weights))
        blocks, device = self.target.blocks, measuring_device(trainer)
        probe, settings = self.probe, self.measured
        samples = measure_probe(self.ranks, together, model, blocks, probe, self.tokenizer, settings, device)
        unit = together(to_dataset, samples, model, blocks, settings, device, probe, started)
        unit = unit.assign_coords(step=trainer.global_step)
        unit.attrs |= {
            "model_name": unit.attrs["model_name"] or type(module).__name__,
            "weights": self.weights,
            "settings_sha256": settings_digest([self._identity(), unit.attrs["inputs_sha256"]]),
        }
        return unit

    def _identity(self) -> dict[str, Any]:
        return run_store.identity(self.settings, self.weights)


CouplingCallback.__doc__ = documented(CouplingCallback.__doc__)
