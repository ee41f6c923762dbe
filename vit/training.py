"""Train one model and measure coupling meanwhile, resuming an interrupted training."""

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit.cells import SCHEMA, check_settings, claim, read, write
from vit.recipe import Recipe, check
from vit.resources import check_accelerator

if TYPE_CHECKING:
    import lightning
    import torch
    from lightning.pytorch.loggers import Logger

    from tracker import CouplingCallback
    from vit.data import Data
    from vit.module import Classifier
    from vit.progress import TrainingLoss

Row = dict[str, Any]


def train(recipe: Recipe, show: bool = False) -> Row:
    """Train and measure as the recipe states, resuming an interrupted run; return the content of result.json.

    Args:
        show: print the epochs, or show a progress bar on a terminal.

    Raises:
        ValueError: if the recipe, its data or its model can't be used.
        BusyError: if another process is training the same cell.
        KeyboardInterrupt: if interrupted; finished epochs are kept.
    """
    check(recipe)
    check_accelerator(recipe.accelerator)
    directory = recipe.directory
    check_settings(directory, recipe)
    if (done := read(directory, "result")) is not None:  # on all ranks, none of which would wait for another
        return done
    from lightning.pytorch.utilities import rank_zero_only

    from vit.data import load

    if rank_zero_only.rank:  # of several processes that train one model, only the first writes to the directory
        return _train(recipe, load(recipe), show=False, first=False)
    with claim(directory, recipe):
        done = read(directory, "result")
        if done is not None:
            return done
        (directory / "failed.json").unlink(missing_ok=True)
        result = _train(recipe, load(recipe), show, first=True)
        write(directory, "result", result)
        (directory / "pace.json").unlink(missing_ok=True)
        if not recipe.keep_checkpoint:
            (directory / "last.ckpt").unlink(missing_ok=True)
        return result


def _train(recipe: Recipe, data: "Data", show: bool, first: bool) -> Row:
    import lightning
    import torch

    from checkpoints.nano import quiet_lightning
    from tracker.loggers.wandb import finish, is_open
    from vit.loaders import Batches
    from vit.module import Classifier, DivergedError

    started = time.perf_counter()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    with quiet_lightning():
        lightning.seed_everything(recipe.seed, verbose=False)
        steps_per_epoch = recipe.steps_per_epoch(len(data.train))
        terminal = show and sys.stdout.isatty()
        module = Classifier(recipe, len(data.classes), steps_per_epoch, show and not terminal)
        given_run = is_open()
        trainer = make_trainer(recipe, data, progress_bar=terminal)
        failed = True
        checkpoint = recipe.directory / "last.ckpt"
        if first:
            _remove_stale(recipe.directory, resumes=checkpoint.exists())
        reason = ""
        try:
            trainer.fit(
                module,
                datamodule=Batches(data, recipe),
                ckpt_path=str(checkpoint) if checkpoint.exists() else None,
                weights_only=False,  # our own file, which contains the state of the loops in addition to tensors
            )
            failed = False
        except SystemExit as stopped:  # raised by Lightning on Ctrl-C
            raise KeyboardInterrupt from stopped
        except DivergedError as error:
            reason = str(error)
        finally:
            loggers: list[Any] = [] if given_run else [*trainer.loggers]
            for logger in loggers:  # the next training of this process has a run of its own
                if left := finish(logger.experiment, failed):
                    print(f"W&B {left}; send it with: wandb sync", file=sys.stderr)
    device = trainer.strategy.root_device
    return {**_result(recipe, module, data, device, reason), "seconds": time.perf_counter() - started}


def _remove_stale(directory: Path, resumes: bool) -> None:
    """Remove what an earlier process left that does not belong to this training."""
    (directory / "pace.json").unlink(missing_ok=True)
    if not resumes:  # without a checkpoint, existing measurements belong to a run that can't be resumed
        shutil.rmtree(directory / "coupling", ignore_errors=True)
        (directory / "progress.json").unlink(missing_ok=True)


def make_trainer(recipe: Recipe, data: "Data", progress_bar: bool, **limits: Any) -> "lightning.Trainer":
    """Return the trainer of a recipe, which writes checkpoints and measurements into its directory.

    Args:
        limits: options of Lightning's Trainer in place of the recipe's.
    """
    import torch
    from lightning import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from vit.averaging import MovingAverage
    from vit.bar import Bar
    from vit.checkpointing import AtomicCheckpoints
    from vit.pace import Pace

    on_gpu = recipe.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    loss, coupling = _coupling(recipe, data)
    pace = Pace(recipe, data, coupling)
    callbacks = [
        *([] if recipe.ema is None else [MovingAverage(recipe.ema)]),
        *([loss, coupling] if loss and coupling else []),
        pace,
        *([Bar(pace)] if progress_bar else []),
        ModelCheckpoint(recipe.directory, "last", save_on_train_epoch_end=True, enable_version_counter=False),
    ]
    options: dict[str, Any] = {
        "max_epochs": recipe.epochs,
        "check_val_every_n_epoch": recipe.test_every or recipe.epochs,
        **limits,
    }
    return Trainer(
        accelerator=recipe.accelerator,
        devices=recipe.devices,
        num_nodes=recipe.num_nodes,
        strategy=recipe.strategy,
        precision=recipe.precision or ("bf16-mixed" if on_gpu else "32-true"),  # type: ignore[arg-type]
        gradient_clip_val=recipe.clip,
        logger=_wandb(recipe),
        callbacks=callbacks,
        plugins=[AtomicCheckpoints()],
        enable_progress_bar=progress_bar,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # our sampler distributes the images
        log_every_n_steps=1,
        **options,
    )


def _coupling(recipe: Recipe, data: "Data") -> tuple["TrainingLoss", "CouplingCallback"] | tuple[None, None]:
    """Return the callbacks that measure the weights that are tested, if coupling is measured."""
    if recipe.schedule is None:
        return None, None
    from tracker import CouplingCallback
    from tracker.training import schedule as schedules
    from vit.progress import TrainingLoss

    # The last step is in the schedule, so that it is measured before the last checkpoint is written: a training that is resumed
    # from that one has nothing left to do.
    last = recipe.epochs * recipe.steps_per_epoch(len(data.train))
    loss = TrainingLoss(data, recipe)
    coupling = CouplingCallback(
        schedule=schedules.AndStep(schedules.choose(**recipe.schedule), last),
        probe=data.probe(recipe.probe_size),
        **recipe.settings.as_options(),
        weights="raw" if recipe.ema is None else "averaged",
        save_dir=str(recipe.directory / "coupling"),
        on_measure=loss.record,
    )
    coupling.run.regular = "every_n_steps" in recipe.schedule  # so that it warns of its cost after each measurement
    return loss, coupling


def _wandb(recipe: Recipe) -> "Logger | bool":
    """Start a W&B run named after the cell, offline if W&B can't be reached; return its logger."""
    from tracker.loggers.wandb import resolve_mode, run_settings, with_offline_fallback

    mode = resolve_mode(recipe.wandb)
    if mode == "disabled":
        return False
    from lightning.pytorch.loggers import WandbLogger
    from lightning.pytorch.utilities import rank_zero_only

    known = (read(recipe.directory, "wandb-run") or {}).get("id") if mode == "online" else None
    tags = [*filter(None, recipe.tags.split(",")), f"wd{recipe.weight_decay:g}", f"sd{recipe.drop_path:g}"]

    def start(mode: str) -> WandbLogger:
        logger = WandbLogger(
            recipe.cell,
            str(recipe.directory),
            id=known,
            project=recipe.project,
            group=recipe.group or recipe.data_name,
            tags=tags,
            config=recipe.identity,
            settings=run_settings(),
            mode=mode,
            resume="allow" if known else None,
        )
        run = logger.experiment.id  # starts the run
        if rank_zero_only.rank == 0:
            write(recipe.directory, "wandb-run", {"id": run})
        return logger

    return with_offline_fallback(start, mode)


def _result(recipe: Recipe, module: "Classifier", data: "Data", device: "torch.device", reason: str) -> Row:
    from tracker.provenance import describe, package_version

    last = module.history[-1] if module.history else {}
    return {
        "schema": SCHEMA,
        "status": "diverged" if reason else "finished",
        "reason": reason,
        "accuracy": None if reason else last["test/accuracy"],
        "loss": None if reason else last["test/loss"],
        "images": {"train": len(data.train), "test": len(data.test)},
        "history": module.history,
        "recipe": recipe.identity,
        "environment": {
            **describe(module.model, device),
            **{f"{name}_version": package_version(name) for name in ("timm", "torchvision", "lightning")},
        },
    }
