"""Watch: measure a model in a training loop of one's own, without changing the training.

The loop calls `watch(step, model)` at every step, and `watch(steps, model, force=True)` after the last.
"""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Literal, Unpack

import torch
import torch.distributed
import xarray as xr
from torch import nn

from tracker.blocks.find import Blocks, Named
from tracker.capture.weights import check_whole
from tracker.common.errors import UsageError
from tracker.loggers.protocol import FunctionLogger, Log, LogTo
from tracker.measures.options import accepts_options, documented
from tracker.measures.settings import Options
from tracker.training import schedule as schedules
from tracker.training.run import Run, Skipped
from tracker.training.target import Forward


class Watch:
    """Measure block coupling, line-shape score and expodistance at chosen steps of any training loop.

    Call `watch(step, model)` with the number of optimizer steps taken so far; it measures if the schedule includes the step.
    The training is bit for bit the same as without. With torch.distributed, every rank calls it at the same steps.

    A loop that continues from a checkpoint of step s makes a new Watch with the same arguments, and calls it with s first: the
    store of `save_dir` continues, and units beyond s are set aside.

    Args:
        every_n_steps: measure at steps 0, n, 2n and so on. Without any schedule: 0, 1, 2, 4, 8 and so on.
        steps, schedule: as in `CouplingCallback`.
        ends: measure also at the first call.
        probe: the samples to measure: prompts (with `tokenizer`), a tensor or mapping that the model's forward takes, a
            training batch, or a function model -> any of these.
        forward: runs a batch, forward(model, batch), for models whose own forward does not take it.
        blocks: as in `tracker.measure`.
        save_dir: directory of the store, for one run.
        log_to: a function (metrics, step), called on rank 0 with a dictionary of numbers for each measured step, such as
            `lambda metrics, step: wandb.log(metrics, step=step)`.
        log: which metrics it receives: "headline", those that docs/training.md lists; "workspace", also those that the saved
            workspace of W&B draws; "all"; or a list, with * for any characters.
        on_measure, max_overhead, thin, name: as in `CouplingCallback`.
        **options: measurement options.

    Raises:
        UsageError: for bad settings, immediately; at the first call for a model without residual blocks, or a probe that it
            does not take.
    """

    @accepts_options
    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        probe: Any,
        steps: Iterable[int] | None = None,
        schedule: Literal["log2", "pythia"] | schedules.Schedule | None = None,
        ends: bool = True,
        tokenizer: Any = None,
        forward: Forward | None = None,
        blocks: Named | Blocks | None = None,
        save_dir: str | None = None,
        log_to: LogTo | None = None,
        log: Log = "headline",
        on_measure: Callable[[xr.Dataset], None] | None = None,
        max_overhead: float | None = 0.05,
        thin: bool = False,
        name: str = "",
        **options: Unpack[Options],
    ):
        if probe is None:
            raise UsageError(
                "probe=None; give the samples to measure: a batch, prompts with their tokenizer, or a function"
            )
        self.run = Run(
            "Watch",
            signature(Watch).parameters,
            options,
            every_n_steps=every_n_steps,
            steps=steps,
            schedule=schedule,
            ends=ends,
            probe=probe,
            tokenizer=tokenizer,
            forward=forward,
            blocks=blocks,
            save_dir=save_dir,
            log=log,
            on_measure=on_measure,
            max_overhead=max_overhead,
            thin=thin,
            name=name,
        )
        self.log_to = log_to
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
            UsageError: for a step before that of the last call, and at the first call as above.
        """
        if step < self.run.last_checked:
            raise UsageError(f"step {step} after step {self.run.last_checked}; make a new Watch for another training")
        parameter = next(model.parameters(), torch.empty(0))
        device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
        first = not self.open
        if first:
            self._start(step, model)
        force = force or (first and self.run.ends and step > self.run.last_measured)
        return self.run.reach(step, lambda: model, device, force=force, thin=not force)

    def close(self) -> None:
        """Warn of skipped steps and of the cost; every rank calls this."""
        if self.open:
            self.open = False
            self.run.finish()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy, or another process, has of this object: it begins anew at its next call."""
        return vars(self) | {"open": False}

    def __enter__(self) -> "Watch":
        """Return self."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an error other ranks may be elsewhere
            self.close()

    def _start(self, step: int, model: nn.Module) -> None:
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
        check_whole(model)
        self.run.find(model)
        self.run.resume_at(step)
        loggers = [FunctionLogger(self.log_to, self.run.prefix)] if self.log_to is not None and rank == 0 else []
        self.run.start(step, rank=rank, ranks=ranks, loggers=loggers)
        self.open = True
        self.run.settle_probe(lambda: None, model)


Watch.__doc__ = documented(Watch.__doc__)
