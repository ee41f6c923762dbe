"""TransformersCallback: measure a model while transformers' Trainer trains it, without changing the training."""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Literal, Unpack

import xarray as xr
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tracker.blocks.find import Blocks, Named
from tracker.capture.weights import check_whole
from tracker.common.errors import UsageError
from tracker.common.notices import warn_caller
from tracker.loggers.protocol import FunctionLogger, Log
from tracker.measures.options import accepts_options, documented
from tracker.measures.settings import Options
from tracker.training import schedule as schedules
from tracker.training.run import Run, Skipped
from tracker.training.target import Forward


class TransformersCallback(TrainerCallback):
    """Measure block coupling, line-shape score and expodistance at chosen steps of a run of transformers' Trainer.

    The training is bit for bit the same as without the callback. Steps are those of the Trainer, `state.global_step`. A run
    that is resumed from a checkpoint (`train(resume_from_checkpoint=...)`) continues its store.

    Args:
        every_n_steps, every_n_epochs, steps, schedule, ends: as in `CouplingCallback`.
        trainer: the Trainer. Its integrations (`report_to`) and `state.log_history` receive the metrics; without it, only the
            store and `on_measure` receive what is measured.
        probe: the samples to measure: prompts (with `tokenizer`), a tensor or mapping that the model's forward takes, or a
            function model -> any of these. None: the first samples of the training data, collated.
        max_samples: how many samples of the training data to measure; a given probe is measured whole.
        tokenizer: of prompts; without one, the Trainer's `processing_class`.
        forward, blocks, save_dir, log, on_measure, max_overhead, thin, name: as in `CouplingCallback`.
        **options: measurement options.

    Raises:
        UsageError: for bad settings, immediately; at the beginning of the training for a model without residual blocks, or
            data that has no first samples.
    """

    @accepts_options
    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        trainer: Trainer | None = None,
        every_n_epochs: int | None = None,
        steps: Iterable[int] | None = None,
        schedule: Literal["log2", "pythia"] | schedules.Schedule | None = None,
        ends: bool = True,
        probe: Any = None,
        tokenizer: Any = None,
        max_samples: int = 8,
        forward: Forward | None = None,
        blocks: Named | Blocks | None = None,
        save_dir: str | None = None,
        log: Log = "headline",
        on_measure: Callable[[xr.Dataset], None] | None = None,
        max_overhead: float | None = 0.05,
        thin: bool = False,
        name: str = "",
        **options: Unpack[Options],
    ):
        self.run = Run(
            "TransformersCallback",
            signature(TransformersCallback).parameters,
            options,
            every_n_steps=every_n_steps,
            every_n_epochs=every_n_epochs,
            steps=steps,
            schedule=schedule,
            ends=ends,
            probe=probe,
            tokenizer=tokenizer if tokenizer is not None or trainer is None else trainer.processing_class,
            max_samples=max_samples,
            forward=forward,
            blocks=blocks,
            save_dir=save_dir,
            log=log,
            on_measure=on_measure,
            max_overhead=max_overhead,
            thin=thin,
            name=name,
        )
        self.trainer = trainer

    @property
    def skipped(self) -> Skipped:
        """The steps that could not be measured or recorded."""
        return self.run.skipped

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy, or another process, has of this object: all but the Trainer, which can't be pickled."""
        return vars(self) | {"trainer": None}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Find the blocks, claim the store, and measure before the first step."""
        model, step = given["model"], state.global_step
        check_whole(model)
        self.run.find(model)
        self.run.resume_at(step)
        loggers = []
        if self.trainer is not None:
            trainer = self.trainer
            loggers = [FunctionLogger(lambda metrics, step: trainer.log(metrics), self.run.prefix)]
        elif args.report_to and state.is_world_process_zero:
            warn_caller(
                f"the metrics are not sent to {', '.join(args.report_to)}, because the callback does not know the Trainer: "
                "trainer.add_callback(TransformersCallback(..., trainer=trainer))"
            )
        self.run.start(step, rank=args.process_index, ranks=args.world_size, loggers=loggers)
        self.run.settle_probe(lambda: _first_samples(given["train_dataloader"], self.run.max_samples), model)
        if self.run.last_checked < step:
            self._reach(args, state, model, force=self.run.ends and self.run.last_checked < 0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Measure if the schedule includes the step, and after the last one."""
        # In on_train_end the Trainer may have loaded the weights of its best step.
        last = state.global_step >= state.max_steps or control.should_training_stop
        self._reach(args, state, given["model"], force=self.run.ends and last, thin=not last)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Measure at the end of every n-th epoch."""
        n = self.run.every_n_epochs
        if n is not None and round(state.epoch or 0) % n == 0:
            self._reach(args, state, given["model"], force=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Measure after the last step, if the training ended early."""
        if self.run.ends and 0 <= self.run.last_measured < state.global_step:
            if args.load_best_model_at_end:
                warn_caller("the last step is not measured: the Trainer has loaded the weights of its best step")
            else:
                self._reach(args, state, given["model"], force=True, thin=False)
        self.run.finish()

    def _reach(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, force: bool, thin: bool = True
    ) -> None:
        self.run.reach(state.global_step, lambda: model, args.device, force=force, thin=thin)


def _first_samples(loader: Any, count: int) -> Any:
    """Return the first samples of the data of a loader, collated as it would.

    Raises:
        UsageError: if the data can't be indexed.
    """
    data = loader.dataset
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UsageError(
            f"the training data is a {type(data).__name__}, which can only be read in order; give the samples to measure: "
            "probe=, prompts with their tokenizer or a batch"
        )
    with isolate_rng():  # the collator may draw masks, the data augmentations
        return loader.collate_fn([data[i] for i in range(min(count, len(data)))])


TransformersCallback.__doc__ = documented(TransformersCallback.__doc__)
