"""CouplingCallback: measure a model while it trains, and leave the training exactly as it was.

    Trainer(callbacks=[CouplingCallback(every_n_steps=500, save_dir="results/run")])

What is measured is a replica (`tracker.measurement`), on the training device, outside autocast and in float32, with the
random state put back. Step s is the state after s optimizer steps.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed
import xarray as xr
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.tensor import DTensor

from tracker.blocks.find import Named
from tracker.capture.inputs import whole_numbers
from tracker.errors import UsageError
from tracker.jacobians.rows import Precision
from tracker.loggers.lightning import LightningAdapter
from tracker.loggers.protocol import Row
from tracker.measurement import labelled, measure_samples
from tracker.measures.dataset import Sample
from tracker.measures.settings import MEMORY_BUDGET, FinalNorm, Settings, chosen_measures
from tracker.provenance import SCHEMA, digest, settings_digest
from tracker.results import Store
from tracker.training import probe as probes
from tracker.training import schedule as schedules
from tracker.training.target import Forward, Target, find_target

MEMORY_TRIES = 3  # with the whole memory budget, half of it and a quarter
WORTH_SAYING = 30.0  # seconds spent on measuring before their share of the run's time is remarked on
REMEDY = "measure less often, on fewer samples or tokens, or set thin=True"


class CouplingCallback(Callback):
    """Measure block coupling, line-shape score and expodistance at chosen steps of any Lightning run.

    The training is bit for bit what it would be without. Numbers go to every logger of the run, to
    `trainer.callback_metrics` (`coupling/mean_offdiag` and the rest, so that EarlyStopping or ModelCheckpoint can watch
    them), and with `save_dir` to a store that `tracker.open_results` and `python -m tracker.report` read while it trains.
    Under DDP the ranks share the probe's samples; with sharded weights (ModelParallelStrategy) each measures them all.

    Out of memory, it tries again with half the memory budget and with a quarter. A measurement that still runs out, or
    meets values that are not finite, is skipped with a warning, and so is a unit that can't be written: training goes on.

    Args:
        every_n_steps: measure at steps 0, n, 2n and on. Without any schedule: 0, 1, 2, 4, 8 and on.
        every_n_epochs: measure at the end of every n-th epoch.
        steps: measure at these steps.
        schedule: "log2", "pythia" (the steps of its published checkpoints), or a function step -> bool.
        ends: measure also before the first step and after the last.
        probe: what to measure on: prompts (with `tokenizer`), a tensor or mapping that the model's forward takes, a batch
            as the training has them, or a function (trainer, module) -> any of these. None: the first validation batch
            of the sanity check, or, where there is none, the first training batch. It is kept in checkpoints.
        max_samples: how many samples of a batch that was found so are measured; a given probe is measured whole.
        forward: how a batch is run, forward(module, batch), for modules whose own forward does not take it.
        blocks: as in `tracker.measure`, with names as they are in the LightningModule.
        k, tokens, final_norm, measures, dtype, precision, memory_budget, window: as in `tracker.measure`.
        weights: "raw", or "averaged": those of the run's WeightAveraging callback, listed before this one.
        save_dir: directory of the store. One run to a directory: a new run is refused, a resumed one goes on.
        heatmaps: send pictures of the coupling matrices to loggers that take them (W&B, TensorBoard).
        on_measure: called on rank 0 with every unit, a Dataset as from `tracker.measure` with its `step`.
        max_overhead: share of the run's time above which measuring is said, once, to take too long; None: never.
        thin: skip scheduled steps (never the ends) that would take the share above `max_overhead`, instead of a warning.
        name: prefix of all metrics, to tell several of these callbacks in one run apart.

    Raises:
        UsageError: for bad settings at once; for a module without residual blocks at setup; for a batch that the model
            does not take before the first step.
    """

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
        k: int | Sequence[int] | None = None,
        tokens: str | Sequence[int] | None = None,
        final_norm: FinalNorm = "auto",
        measures: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        precision: Precision = "float32",
        memory_budget: int = MEMORY_BUDGET,
        window: int | None = None,
        weights: Literal["raw", "averaged"] = "raw",
        save_dir: str | None = None,
        heatmaps: bool = True,
        on_measure: Callable[[xr.Dataset], None] | None = None,
        max_overhead: float | None = 0.05,
        thin: bool = False,
        name: str = "",
    ):
        if every_n_epochs is None:
            self.schedule = schedules.choose(every_n_steps, steps, schedule)
        elif (every_n_steps, steps, schedule) == (None, None, None):
            schedules.positive("every_n_epochs", every_n_epochs)
            self.schedule = lambda step: False
        else:
            raise UsageError("every_n_epochs and another schedule given; give one")
        if weights not in ("raw", "averaged"):
            raise UsageError(f"weights={weights!r}; choose 'raw' or 'averaged'")
        if max_overhead is not None and not 0 < max_overhead < 1:
            raise UsageError(f"max_overhead={max_overhead!r}; give a share of the run's time such as 0.05, or None")
        if thin and max_overhead is None:
            raise UsageError("thin=True needs a share to keep to: max_overhead=0.05")
        if isinstance(probe, str) or probes.is_prompts(probe):
            probe = [probe] if isinstance(probe, str) else probe
            if tokenizer is None:
                raise UsageError("the probe is prompts; give their tokenizer too: tokenizer=...")
            if forward is not None:
                raise UsageError("the probe is prompts, which the language model takes itself; leave forward= out")
        self.every_n_epochs = every_n_epochs
        self.ends = ends
        self.given = probe
        self.tokenizer = tokenizer
        self.max_samples = schedules.positive("max_samples", max_samples)
        self.forward = forward
        self.blocks = blocks
        self.settings = Settings(
            k, tokens, final_norm, "auto", dtype, precision, memory_budget, chosen_measures(measures), window
        )
        self.weights = weights
        self.store = Store(save_dir) if save_dir is not None else None
        self.heatmaps = heatmaps
        self.on_measure = on_measure
        self.max_overhead = max_overhead
        self.thin = thin
        self.steady = every_n_steps is not None or every_n_epochs is not None
        self.name = name
        self.prefix = f"{name}/" if name else ""

        self.probe: Any = None
        self.served = -1  # the step up to which the schedule has been answered
        self.measured = -1  # the last step measured
        self.began = False  # whether this fit has come to its first batch
        self.target: Target | None = None
        self.clock = schedules.Clock()
        self.loggers: list[LightningAdapter] = []

    # The hooks, in the order in which Lightning calls them.

    @property
    def state_key(self) -> str:
        """Of its own for each name and kind of weights."""
        return self._generate_state_key(name=self.name, weights=self.weights)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the blocks before any time is spent, unless the module builds them later."""
        self.target = None
        if trainer.global_step < self.served:  # this callback has seen another run; a checkpoint says its own in time
            self.served, self.measured, self.probe = -1, -1, None
        if stage == "fit" and not is_overridden("configure_model", pl_module):
            self.target = find_target(pl_module, self.blocks, self.forward)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the blocks of a module that has built them by now; refuse weights that can't be read."""
        if self.target is None:
            self.target = find_target(pl_module, self.blocks, self.forward)
        if self.weights == "averaged" and not any(
            isinstance(other, WeightAveraging) for other in _before(self, trainer)
        ):
            raise UsageError(
                "weights='averaged' takes those of a WeightAveraging callback; list one before this CouplingCallback"
            )
        if isinstance(trainer.strategy, FSDPStrategy) or any(hasattr(p, "ds_id") for p in pl_module.parameters()):
            raise UsageError(
                f"{type(trainer.strategy).__name__} keeps weights in flattened pieces that can't be read one by one; "
                "shard with ModelParallelStrategy (FSDP2), or train with DDP"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the schedule and the probe where a checkpoint left them."""
        self.served, self.measured, self.probe = (state_dict[name] for name in ("served", "measured", "probe"))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"served": self.served, "measured": self.measured, "probe": self.probe}

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the first validation batch as it passes through the sanity check: no loader is read for it."""
        if trainer.sanity_checking and self.probe is None and self.given is None:
            self.probe = self._cut(batch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See that the store is this run's."""
        self.began = False
        self.clock = schedules.Clock()
        self.loggers = [LightningAdapter(logger, self.prefix) for logger in trainer.loggers]
        if self.store is not None:
            fault = self._claim(self.store, trainer.global_step) if trainer.is_global_zero else None
            fault = trainer.strategy.broadcast(fault)
            if fault:
                raise UsageError(fault)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure before the first step, and where a resumed run had come to but not measured."""
        if not self.began:
            self.began = True
            self._settle_probe(trainer, pl_module, batch)
        if self.served < trainer.global_step:
            self._serve(trainer, pl_module, now=self.ends and self.served < 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure if optimizer steps were taken and the schedule names one of them."""
        n = self.every_n_epochs
        end_of_nth = n is not None and trainer.is_last_batch and (trainer.current_epoch + 1) % n == 0
        if self.served < trainer.global_step or end_of_nth:
            self._serve(trainer, pl_module, now=end_of_nth)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after the last step."""
        if self.ends and 0 <= self.measured < trainer.global_step:
            averaging = (WeightAveraging, StochasticWeightAveraging)
            if self.weights == "raw" and any(isinstance(other, averaging) for other in _before(self, trainer)):
                warnings.warn(
                    "the last step is not measured: averaged weights have taken the place of the raw ones; list "
                    "CouplingCallback before the averaging callback",
                    stacklevel=2,
                )
            else:
                self._serve(trainer, pl_module, now=True, thin=False)
        if not self.steady:  # the shares of a schedule that thins out tell little before the end
            self._remark(self.clock.share, "this run")

    # What they do.

    def _claim(self, store: Store, step: int) -> str | None:
        """Take the store for this run at a step; returns what is against it, if anything."""
        there = store.steps()
        if there and self.served < 0:
            return (
                f"{store.path} holds the units of another run (up to step {there[-1]}); choose another save_dir, or "
                "resume that run from its checkpoint: trainer.fit(..., ckpt_path=...)"
            )
        try:
            store.settle(self._identity())
            store.set_aside([late for late in there if late > step])
        except (ValueError, OSError) as error:
            return f"save_dir can't be used: {error}"
        return None

    def _identity(self) -> dict[str, Any]:
        """What every unit of the store has in common."""
        asked = {name: value for name, value in vars(self.settings).items() if name not in ("dtype", "memory_budget")}
        if not self.settings.asks("tokenwise"):
            del asked["pair_layers"]  # stores of before this was a setting keep their identity
        for name in ("k", "tokens"):
            if asked[name] is not None and not isinstance(asked[name], str):
                asked[name] = whole_numbers(asked[name])
        return {"schema": SCHEMA, **asked, "dtype": str(self.settings.dtype), "weights": self.weights}

    def _settle_probe(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Find the probe, the same on every rank, unless a checkpoint brought it."""
        given = self.given(trainer, module) if callable(self.given) else self.given
        given = None if given is None else probes.plain(given)
        if self.probe is None:
            self.probe = given if given is not None else self._cut(batch)
        elif given is not None and digest(given) != digest(self.probe):
            warnings.warn("the probe given is not that of the checkpoint, which goes on being measured", stacklevel=2)
        self.probe = trainer.strategy.broadcast(self.probe)

    def _cut(self, batch: Any) -> Any:
        """A probe from a batch that was found."""
        return probes.plain(probes.select(batch, slice(self.max_samples)))

    def _serve(self, trainer: Trainer, module: LightningModule, now: bool, thin: bool = True) -> None:
        """Answer the schedule up to the present step: measure if it is due, or `now`."""
        step = trainer.global_step
        asked = now or schedules.due(self.schedule, self.served, step)
        if asked and thin and self.thin and self.max_overhead and self.measured >= 0:
            asked = trainer.strategy.broadcast(self.clock.has_room(self.max_overhead))  # one rank's clock for all
        self.served = step
        if not asked or self.measured == step:
            return
        with isolate_rng(), self.clock:
            unit = self._measure(trainer, module)
            self.measured = step
            if unit is not None:
                self._publish(trainer, unit)
        for logger in self.loggers:
            logger.log(Row(step, {"coupling/seconds": self.clock.last, "coupling/share": self.clock.last_share}))
        if self.steady and not self.thin:
            self._remark(self.clock.last_share, "the time since the last measurement")

    def _remark(self, share: float, of: str) -> None:
        """Say once that measuring takes too long."""
        if self.max_overhead and share > self.max_overhead and self.clock.spent > WORTH_SAYING:
            warnings.warn(
                f"measuring took {share:.0%} of {of}, more than max_overhead={self.max_overhead:g}: {REMEDY}",
                stacklevel=2,
            )
            self.max_overhead = None

    def _measure(self, trainer: Trainer, module: LightningModule) -> xr.Dataset | None:
        """The unit of the present step; None, with a warning, where it can't be had."""
        assert self.target is not None
        started = time.perf_counter()
        model, device = self.target.model(self._root(trainer, module)), trainer.strategy.root_device
        ranks = trainer.world_size
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            ranks = 1  # sharded weights are brought together block by block, by all ranks at once: each measures all
        samples, fault = self._samples(model, device, trainer.global_rank if ranks > 1 else 0, ranks)
        if ranks > 1:
            everyones: list[Any] = [None] * ranks
            torch.distributed.all_gather_object(everyones, (samples, fault))
            samples = probes.in_order([part for part, _ in everyones])
            fault = next((other for _, other in everyones if other is not None), None)
        if isinstance(fault, UsageError) and self.measured < 0:
            raise fault  # nothing has been spent yet, and later steps would fare no better
        if fault is not None:
            warnings.warn(
                f"step {trainer.global_step} is not measured ({type(fault).__name__}: {fault}); training goes on",
                stacklevel=2,
            )
            return None
        unit = labelled(samples, model, self.target.blocks, self.settings, device, self.probe, started)
        unit = unit.assign_coords(step=trainer.global_step)
        unit.attrs |= {
            "model_name": unit.attrs["model_name"] or type(module).__name__,
            "weights": self.weights,
            "settings_sha256": settings_digest([self._identity(), unit.attrs["inputs_sha256"]]),
        }
        return unit

    def _samples(
        self, model: nn.Module, device: torch.device, rank: int, ranks: int
    ) -> tuple[list[Sample], Exception | None]:
        """What this rank measures, every `ranks`-th sample, or what kept it from measuring."""
        assert self.target is not None
        mine = slice(rank, None, ranks)
        try:
            if rank >= probes.size(self.probe):
                return [], None
            calls = probes.calls(model, probes.select(self.probe, mine), self.tokenizer)
            for halved in range(MEMORY_TRIES):
                settings = replace(self.settings, memory_budget=self.settings.memory_budget >> halved)
                try:
                    return measure_samples(model, self.target.blocks, calls, settings, device), None
                except torch.OutOfMemoryError as error:
                    torch.cuda.empty_cache()
                    fault = error
            return [], fault
        except (UsageError, FloatingPointError) as error:
            return [], error

    def _root(self, trainer: Trainer, module: LightningModule) -> nn.Module:
        """The training module, or its averaged copy."""
        if self.weights == "raw":
            return module
        averaging = next(other for other in _before(self, trainer) if isinstance(other, WeightAveraging))
        averaged = averaging._average_model  # Lightning offers no other way to it
        assert averaged is not None
        return averaged.module

    def _publish(self, trainer: Trainer, unit: xr.Dataset) -> None:
        """Send a unit to the loggers, the metrics that other callbacks watch, the store and the caller's function."""
        row = Row.from_unit(unit)
        for logger in self.loggers:
            if trainer.is_global_zero and self.heatmaps:
                logger.images(row)
            logger.log(row)
        # An undefined value would make EarlyStopping end the run.
        finite = {self.prefix + name: torch.tensor(x) for name, x in row.scalars.items() if math.isfinite(x)}
        trainer.callback_metrics.update(finite)
        if not trainer.is_global_zero:
            return
        if self.store is not None:
            try:
                self.store.write(row.step, unit)
            except OSError as error:
                warnings.warn(f"step {row.step} is measured but not stored: {error}; training goes on", stacklevel=2)
        if self.on_measure is not None:
            self.on_measure(unit)


def _before(callback: Callback, trainer: Trainer) -> list[Callback]:
    """The callbacks that Lightning calls before this one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks[: callbacks.index(callback)]
