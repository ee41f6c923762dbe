"""CouplingCallback: measure a model while it trains, without changing the training.

    Trainer(callbacks=[CouplingCallback(every_n_steps=500, save_dir="results/run")])

Measurements run on a replica (`tracker.measurement`) on the training device, outside autocast and in float32, and restore
the random state. Step s is the state after s optimizer steps.
"""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from tracker.common.errors import UsageError, warn_caller
from tracker.loggers.lightning import is_lightning, logger_of
from tracker.skipped import Skipped
from tracker.training import probe as probes
from tracker.training.options import RunOptions, accepts_run_options
from tracker.training.run import TrainingRun

AVERAGING = "callbacks.WeightAveraging"


@accepts_run_options
class CouplingCallback(Callback):
    """Measure block coupling, line-shape score and expodistance at chosen steps of any Lightning run.

    The training is bit for bit the same as without the callback. About a dozen headline numbers (`log`), and pictures of the
    coupling matrices, go to every logger of the run; all numbers go to `trainer.callback_metrics` (`miscoupling/mean_offdiag` and
    the rest, for EarlyStopping or ModelCheckpoint), and with `save_dir` to a store that `tracker.open_results` and
    `python -m tracker.report` can read during the training.
    Under DDP the ranks share the probe's samples; with sharded weights (ModelParallelStrategy) each rank measures all.

    If memory runs out, the callback tries again with half the memory budget and with a quarter. It skips a measurement
    that still runs out or fails, on all ranks, with a warning; `skipped.reasons`, the store and its page name these steps.
    An error of the device itself ends the training. On devices without float64 (MPS), the CPU measures.

    Args:
        every_n_steps: measure at steps 0, n, 2n and so on. Without any schedule: 0, 1, 2, 4, 8 and so on.
        every_n_epochs: measure at the end of every n-th epoch instead.
        probe: the samples to measure: prompts (with `tokenizer`), a tensor or mapping that the model's forward takes, a
            training batch, or a function (trainer, module) -> any of these. None: the first 8 samples of the first validation
            batch of the sanity check; without one, of the first training batch. Checkpoints contain the probe.
        weights: "raw", or "averaged": the weights of the run's WeightAveraging callback, listed before this one.
        **options: options of the run and of its measurements.

    Raises:
        UsageError: for bad settings, immediately; for a module without residual blocks, at setup; for a batch that the
            model does not take, before the first step.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        every_n_epochs: int | None = None,
        probe: Any = None,
        weights: Literal["raw", "averaged"] = "raw",
        **options: Unpack[RunOptions],
    ):
        self.run = TrainingRun(
            CouplingCallback,
            options,
            every_n_steps=every_n_steps,
            every_n_epochs=every_n_epochs,
            probe=probe,
            weights=weights,
        )
        self.name = options.get("name", "")
        self.trains = True  # not validation, a test or predictions alone
        self.first_batch_seen = False

    @property
    def probe(self) -> Any:
        """What is measured, once it is known: tensors, numbers and texts in dictionaries, tuples and lists."""
        return self.run.probe

    @property
    def skipped(self) -> Skipped:
        """The steps that could not be measured or recorded."""
        return self.run.skipped

    # The hooks, in the order in which Lightning calls them.

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint, different for each name and choice of weights."""
        return self._generate_state_key(name=self.name, weights=self.run.weights)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier training. Validation, tests and predictions change nothing."""
        self.trains = stage == "fit"
        if not self.trains:
            return
        # What it knows is of another run, or of this one's first attempt; a checkpoint's state is loaded after setup.
        if trainer.global_step < self.run.last_checked or trainer.global_step == 0:
            self.run.forget()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the blocks, which `configure_model` has built by now; refuse weights that can't be read."""
        self.run.find(pl_module, pl_module.device)
        self.check_readable(trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the probe from a checkpoint from which a training is resumed."""
        if self.trains:
            self.run.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return self.run.state_dict()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Take the probe from the first validation batch of the sanity check, which needs no extra loading."""
        if trainer.sanity_checking and self.probe is None and self.run.given_probe is None:
            self.run.probe = probes.first_samples(batch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Claim the store for this run."""
        self.first_batch_seen = False

        def add_metrics(metrics: Mapping[str, float]) -> None:
            trainer.callback_metrics.update(
                {name: torch.tensor(value) for name, value in metrics.items()}
            )

        self.run.start(
            trainer.global_step,
            rank=trainer.global_rank,
            ranks=trainer.world_size,
            loggers=[
                logger_of(logger, self.run.prefix)
                for logger in trainer.loggers
                if trainer.is_global_zero
            ],
            metrics=add_metrics,
            stores=not trainer.fast_dev_run,  # type: ignore[attr-defined]
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure before the first step, and at the step of a checkpoint that was saved before it was measured."""
        if not self.first_batch_seen:
            self.first_batch_seen = True
            self.run.settle_probe(lambda: batch, trainer, pl_module)
        if self.run.last_checked < trainer.global_step:
            self._reach(trainer, pl_module, force=self.run.last_checked < 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure if the schedule includes an optimizer step of this batch."""
        n = self.run.every_n_epochs
        end_of_nth = (
            n is not None and trainer.is_last_batch and (trainer.current_epoch + 1) % n == 0
        )
        if self.run.last_checked < trainer.global_step or end_of_nth:
            self._reach(trainer, pl_module, force=end_of_nth)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure after the last step."""
        if 0 <= self.run.last_measured < trainer.global_step:
            replacing = (AVERAGING, "callbacks.StochasticWeightAveraging")
            if self.run.weights == "raw" and self._before(trainer, *replacing):
                warn_caller(
                    "the last step is not measured: averaged weights have replaced the raw ones; list CouplingCallback "
                    "before the averaging callback"
                )
            else:
                self._reach(trainer, pl_module, force=True)
        self.run.finish()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Let a training that follows in this process begin again. One that the user has stopped keeps its units."""
        if self.trains and isinstance(exception, Exception):
            self.run.fail()

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Refuse transformers' Trainer, which calls this.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "CouplingCallback is for Lightning; transformers' Trainer takes tracker.TransformersCallback"
        )

    on_train_begin = on_init_end

    def check_readable(self, trainer: Trainer) -> None:
        """Check that the weights can be read during the training.

        Raises:
            UsageError: for averaged weights without an averaging callback, and for weights in flattened pieces.
        """
        if self.run.weights == "averaged" and not self._before(trainer, AVERAGING):
            raise UsageError(
                "weights='averaged' takes those of a WeightAveraging callback; list one before this CouplingCallback"
            )
        if is_lightning(trainer.strategy, "strategies.FSDPStrategy"):
            raise UsageError(
                f"{type(trainer.strategy).__name__} keeps weights in flattened pieces that can't be read one by one; "
                "shard with ModelParallelStrategy (FSDP2), or train with DDP"
            )

    def _reach(self, trainer: Trainer, module: LightningModule, force: bool) -> None:
        def measured() -> nn.Module:
            if self.run.weights == "raw":
                return module
            # Lightning has no public access
            return self._before(trainer, AVERAGING)[0]._average_model.module

        self.run.reach(trainer.global_step, measured, trainer.strategy.root_device, force=force)

    def _before(self, trainer: Trainer, *names: str) -> list[Any]:
        """Return the callbacks of some of Lightning's classes that Lightning calls before this one."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        earlier = callbacks[: callbacks.index(self)]
        return [other for other in earlier if is_lightning(other, *names)]
