"""TransformersCallback: measure a model while transformers' Trainer trains it, without changing the training."""

import weakref
from copy import copy
from functools import cache, partial
from typing import Any, Unpack

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    DVCLiveCallback,
    TrackioCallback,
    WandbCallback,
)

from tracker.common.errors import UsageError, warn_caller
from tracker.loggers.protocol import FunctionLogger, Logger
from tracker.loggers.wandb import OpenRun, open_run
from tracker.skipped import Skipped
from tracker.training.options import RunOptions, accepts_run_options
from tracker.training.probe import SAMPLES
from tracker.training.run import TrainingRun

# They number the rows that they get: a row more would move the steps of the training's own
NUMBERING = (DVCLiveCallback, TrackioCallback)


@accepts_run_options
class TransformersCallback(TrainerCallback):
    """Measure block coupling, line-shape score and expodistance at chosen steps of a run of transformers' Trainer.

    The training is bit for bit the same as without the callback. Steps are those of the Trainer, `state.global_step`. A run
    that is resumed from a checkpoint (`train(resume_from_checkpoint=...)`) continues its store.

    Args:
        every_n_steps: measure at steps 0, n, 2n and so on. Without any schedule: 0, 1, 2, 4, 8 and so on.
        every_n_epochs: measure at the end of every n-th epoch instead.
        trainer: the Trainer. Its `state.log_history` and the `on_log` of its callbacks, such as its integrations (`report_to`)
            except DVCLive and Trackio, receive the metrics; without it, only W&B, the store and `on_measure` receive what is
            measured.
        probe: the samples to measure: prompts (with `tokenizer`), a tensor or mapping that the model's forward takes, or a
            function model -> any of these. None: the first 8 samples of the training data, collated.
        **options: options of the run and of its measurements.

    Raises:
        UsageError: for bad settings, immediately; at the beginning of the training for a model without residual blocks, or
            data that has no first samples.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        every_n_epochs: int | None = None,
        trainer: Trainer | None = None,
        probe: Any = None,
        **options: Unpack[RunOptions],
    ):
        if options.get("tokenizer") is None and trainer is not None:
            options["tokenizer"] = trainer.processing_class
        self.run = TrainingRun(
            TransformersCallback,
            options,
            every_n_steps=every_n_steps,
            every_n_epochs=every_n_epochs,
            probe=probe,
        )
        self.trainer = trainer

    @property
    def skipped(self) -> Skipped:
        """The steps that could not be measured or recorded."""
        return self.run.skipped

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy, or another process, has of this object: all but the Trainer, which can't be pickled."""
        return vars(self) | {"trainer": None}

    @property
    def setup(self) -> None:
        """Refuse the Trainer of Lightning, which asks for this.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "TransformersCallback is for transformers' Trainer; that of Lightning takes tracker.CouplingCallback"
        )

    on_exception = setup

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        """Find the blocks, claim the store, and measure before the first step."""
        model, step = context["model"], state.global_step
        self.run.tokenizer = self.run.tokenizer or context.get("processing_class")

        @cache  # the training's data and its collator are asked once
        def take() -> Any:
            return _first_samples(context["train_dataloader"])

        loggers: list[Logger] = []
        others = [*(args.report_to or ())]
        # The Trainer's callback for W&B knows neither axes nor pictures
        if "wandb" in others and (run := open_run()):
            others.remove("wandb")
            loggers.append(OpenRun(run, self.run.prefix))
        if self.trainer is not None:
            apart = (*NUMBERING, WandbCallback) if loggers else NUMBERING
            loggers.append(FunctionLogger(partial(_log, self.trainer, apart), self.run.prefix))
        elif others and state.is_world_process_zero:
            warn_caller(
                f"the metrics are not sent to {', '.join(others)}, because the callback does not know the Trainer: "
                "trainer.add_callback(TransformersCallback(..., trainer=trainer))"
            )
        self.run.begin(
            step,
            model,
            args.device,
            rank=args.process_index,
            ranks=args.world_size,
            loggers=loggers,
            take=take,
        )
        if self.run.held is not None:
            # The Trainer calls no callback after an error. Without this callback its training can't go on.
            weakref.finalize(self, setattr, self.run.held, "failed", True)
        if self.run.last_checked < step:
            self._reach(args, state, model, force=self.run.last_checked < 0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        """Measure if the schedule includes the step, and after the last one."""
        # In on_train_end the Trainer may have loaded the weights of its best step.
        last = state.global_step >= state.max_steps or control.should_training_stop
        self._reach(args, state, context["model"], force=last)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        """Measure at the end of every n-th epoch."""
        n = self.run.every_n_epochs
        # The Trainer counts epochs in fractions, with rounding.
        if n is not None and round(state.epoch or 0) % n == 0:
            self._reach(args, state, context["model"], force=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        """Measure after the last step, if the training ended early."""
        if 0 <= self.run.last_measured < state.global_step:
            if args.load_best_model_at_end:
                warn_caller(
                    "the last step is not measured: the Trainer has loaded the weights of its best step"
                )
            else:
                self._reach(args, state, context["model"], force=True)
        self.run.finish()

    def _reach(
        self, args: TrainingArguments, state: TrainerState, model: nn.Module, force: bool
    ) -> None:
        self.run.reach(state.global_step, lambda: model, args.device, force=force)


def _log(trainer: Trainer, apart: tuple[type, ...], metrics: dict[str, float], step: int) -> None:
    """Add a row to the Trainer's history, and pass it to its callbacks except those of some classes.

    `Trainer.log` would also clear `control.should_log`, on which the training's own row depends, and in a subclass add to this
    row what belongs to that one.
    """
    state, args = trainer.state, trainer.args
    row = {**metrics, "epoch": state.epoch}
    if args.include_num_input_tokens_seen != "no":
        row["num_input_tokens_seen"] = state.num_input_tokens_seen
    state.log_history.append({**row, "step": step})
    handler = copy(trainer.callback_handler)
    handler.callbacks = [one for one in handler.callbacks if not isinstance(one, apart)]
    handler.on_log(args, state, copy(trainer.control), row)


def _first_samples(loader: Any) -> Any:
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
    return loader.collate_fn([data[i] for i in range(min(SAMPLES, len(data)))])
