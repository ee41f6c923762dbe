"""Watch: measure a model in a training loop of one's own, without changing the training.

The loop calls `watch(step, model)` at every step, and `watch(steps, model, force=True)` after the last.
"""

from typing import Any, Unpack

import torch
import torch.distributed
import xarray as xr
from torch import nn

from tracker.blocks.find import check_model
from tracker.common.errors import UsageError
from tracker.loggers.lightning import logger_of
from tracker.skipped import Skipped
from tracker.store import whole_step
from tracker.training.options import RunOptions, accepts_run_options
from tracker.training.run import TrainingRun


@accepts_run_options
class Watch:
    """Measure block coupling, line-shape score and expodistance at chosen steps of any training loop.

    Call `watch(step, model)` with the number of optimizer steps taken so far; it measures if the schedule includes the step.
    The training is bit for bit the same as without. With torch.distributed, every rank calls it at the same steps.

    A loop that continues from a checkpoint of step s makes a new Watch with the same arguments, and calls it with s first: the
    store of `save_dir` continues, and units beyond s are set aside.

    Args:
        every_n_steps: measure at steps 0, n, 2n and so on. Without any schedule: 0, 1, 2, 4, 8 and so on.
        probe: the samples to measure: prompts (with `tokenizer`), a tensor or mapping that the model's forward takes, a
            training batch, or a function model -> any of these.
        log_to: what receives the metrics of each measured step on rank 0: a W&B run (`log_to=wandb.init(...)`) or a logger of
            Lightning or a SummaryWriter of TensorBoard, with heat maps as in `CouplingCallback`, or a function (metrics, step)
            of a dictionary of numbers.
        **options: options of the run and of its measurements.

    Raises:
        UsageError: for bad settings, immediately; at the first call for a model without residual blocks, or a probe that it
            does not take.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        probe: Any,
        log_to: Any = None,
        **options: Unpack[RunOptions],
    ):
        if probe is None:
            raise UsageError(
                "probe=None; give the samples to measure: a batch, prompts with their tokenizer, or a function"
            )
        self.run = TrainingRun(Watch, options, every_n_steps=every_n_steps, probe=probe)
        self.log_to = log_to
        # A target that is no logger is refused here, and not after hours at the first measurement.
        if log_to is not None:
            logger_of(log_to)
        self.open = False

    @property
    def skipped(self) -> Skipped:
        """The steps that could not be measured or recorded."""
        return self.run.skipped

    def __call__(self, step: int, model: nn.Module, *, force: bool = False) -> xr.Dataset | None:
        """Measure the model if the schedule includes a step since the last call.

        Args:
            step: the number of optimizer steps that the model has taken.
            force: measure in any case, for example after the last step.

        Returns:
            What was measured, a Dataset as from `tracker.measure` with its `step`; None if nothing was.

        Raises:
            UsageError: for a step that is no whole number or before that of the last call, and at the first call as above.
        """
        step = whole_step(step)
        check_model(model)
        if self.open and step < self.run.last_checked:
            raise UsageError(
                f"step {step} after step {self.run.last_checked}; make a new Watch for another training"
            )
        parameter = next(model.parameters(), torch.empty(0))
        device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
        first = not self.open
        if first:
            self._start(step, model, device)
        # The state from which the loop begins or continues
        force = force or (first and step > self.run.last_measured)
        return self.run.reach(step, lambda: model, device, force=force)

    def close(self) -> None:
        """Warn of skipped steps and of the cost; every rank calls this."""
        if self.open:
            self.open = False
            self.run.finish()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy, or another process, has of this object: it begins anew at its next call, without a logger."""
        return vars(self) | {
            "open": False,
            "log_to": self.log_to if callable(self.log_to) else None,
        }

    def __enter__(self) -> "Watch":
        """Return self."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error other ranks may be elsewhere
            self.close()
            return
        self.open = False
        if issubclass(kind, Exception):
            self.run.fail()
        else:  # the user has stopped it: it keeps its units
            self.run.leave()

    def _start(self, step: int, model: nn.Module, device: torch.device) -> None:
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, ranks = (
            (torch.distributed.get_rank(), torch.distributed.get_world_size())
            if together
            else (0, 1)
        )
        loggers = (
            [logger_of(self.log_to, self.run.prefix)]
            if self.log_to is not None and rank == 0
            else []
        )
        self.run.begin(step, model, device, rank=rank, ranks=ranks, loggers=loggers)
        self.open = True
