"""Train one model and measure coupling meanwhile, resuming an interrupted training."""

import io
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lightning
import torch
import xarray as xr
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from checkpoints.nano import quiet_lightning
from tracker import CouplingCallback
from tracker.common.files import write_atomic
from tracker.common.text import first_line
from tracker.loggers.wandb import (
    finish,
    open_run,
    resolve_mode,
    run_settings,
    with_offline_fallback,
)
from tracker.provenance import describe, package_version
from vit.cells import SCHEMA, check_settings, claim, read, write
from vit.data import Data, balanced, load
from vit.loaders import Batches
from vit.module import Classifier, DivergedError
from vit.recipe import Recipe, check

Row = dict[str, Any]
# At most, of those on which the training loss is recorded; balanced over classes, the same for every seed.
IMAGES = 1_000


def train(recipe: Recipe, show: bool = False) -> Row:
    """Train and measure as the recipe states, resuming an interrupted run; return the content of result.json.

    Args:
        show: print a line for each epoch, below which a terminal shows Lightning's progress bar.

    Raises:
        ValueError: if the recipe, its data or its model can't be used.
        BusyError: if another process is training the same cell.
        KeyboardInterrupt: if interrupted; finished epochs are kept.
    """
    check(recipe)
    check_accelerator(recipe.accelerator)
    directory = recipe.directory
    check_settings(recipe)
    # On all ranks, none of which would wait for another
    if (result := read(directory, "result")) is not None:
        return result
    # Of several processes that train one model, only the first writes to the directory
    if rank_zero_only.rank:
        return _train(recipe, show=False)
    with claim(recipe):
        if (result := read(directory, "result")) is not None:
            return result
        (directory / "failed.json").unlink(missing_ok=True)
        result = _train(recipe, show)
        write(directory, "result", result)
        if not recipe.keep_checkpoint:
            (directory / "last.ckpt").unlink(missing_ok=True)
        return result


def train_cell(recipe: Recipe) -> Row:
    """Train a cell of a grid as `train` does; what is printed meanwhile goes to CELL/log.txt."""
    recipe.directory.mkdir(parents=True, exist_ok=True)
    with (
        open(recipe.directory / "log.txt", "a", buffering=1) as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        return train(recipe, show=True)


def check_accelerator(name: str) -> None:
    """Check that there is a GPU if one is asked for by `--accelerator`.

    Raises:
        ValueError: if PyTorch finds none.
    """
    if name in ("gpu", "cuda") and not torch.accelerator.device_count():
        raise ValueError(
            f"--accelerator {name}; PyTorch finds no GPU on this machine: leave it out, or give cpu"
        )


def _train(recipe: Recipe, show: bool) -> Row:
    data = load(recipe)
    started = time.perf_counter()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    with quiet_lightning():
        lightning.seed_everything(recipe.seed, verbose=False)
        steps_per_epoch = recipe.steps_per_epoch(len(data.train))
        module = Classifier(recipe, len(data.classes), steps_per_epoch, show)
        has_run = open_run() is not None  # of the caller
        trainer = make_trainer(
            recipe, data, module, enable_progress_bar=show and sys.stdout.isatty()
        )
        failed, reason = True, ""
        checkpoint = recipe.directory / "last.ckpt"
        resumed = checkpoint.exists()
        # Existing measurements are then of a run that can't be resumed
        if rank_zero_only.rank == 0 and not resumed:
            shutil.rmtree(recipe.directory / "coupling", ignore_errors=True)
            (recipe.directory / "progress.json").unlink(missing_ok=True)
        try:
            trainer.fit(
                module,
                datamodule=Batches(data, recipe),
                ckpt_path=checkpoint if resumed else None,
                # Our own file, which contains the state of the loops in addition to tensors
                weights_only=False,
            )
            failed = False
        except SystemExit as stopped:  # raised by Lightning on Ctrl-C
            raise KeyboardInterrupt from stopped
        except DivergedError as error:
            reason = str(error)
        finally:
            loggers: Any = () if has_run else trainer.loggers
            for logger in loggers:  # the next training of this process has a run of its own
                if unsent := finish(logger.experiment, failed):
                    print(f"W&B {unsent}; send it with: wandb sync", file=sys.stderr)
    result = _result(recipe, module, data, trainer.strategy.root_device, reason)
    return result | {"seconds": time.perf_counter() - started}


def make_trainer(
    recipe: Recipe, data: Data, module: Classifier, **options: Any
) -> lightning.Trainer:
    """Return the trainer of a recipe, which writes checkpoints and measurements into its directory.

    Args:
        options: more options of Lightning's Trainer.
    """
    on_gpu = recipe.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    checkpoint = ModelCheckpoint(
        recipe.directory, "last", save_on_train_epoch_end=True, enable_version_counter=False
    )
    return lightning.Trainer(
        accelerator=recipe.accelerator,
        devices=recipe.devices,
        precision=recipe.precision or ("bf16-mixed" if on_gpu else "32-true"),  # type: ignore[arg-type]
        gradient_clip_val=recipe.clip,
        logger=_wandb(recipe),
        callbacks=[*_coupling(recipe, data, module), checkpoint],
        plugins=[AtomicCheckpoints()],
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # our sampler distributes the images
        log_every_n_steps=1,
        check_val_every_n_epoch=recipe.test_every or recipe.epochs,
        max_epochs=recipe.epochs,
        **options,
    )


def _coupling(recipe: Recipe, data: Data, module: Classifier) -> list[CouplingCallback]:
    """Return the callback that measures the weights that are tested, if coupling is measured."""
    # The last step is one of them, so that it is measured before the last checkpoint is written: a training that is resumed from
    # that one has nothing left to do.
    steps = recipe.measured_steps(recipe.epochs * recipe.steps_per_epoch(len(data.train)))
    if steps is None:
        return []
    return [
        CouplingCallback(
            steps=steps,
            probe=data.probe(recipe.probe_size),
            **recipe.settings.as_options(),
            save_dir=str(recipe.directory / "coupling"),
            on_measure=_record_loss(recipe, data, module),
        )
    ]


def _record_loss(recipe: Recipe, data: Data, module: Classifier) -> Callable[[xr.Dataset], None]:
    """Return a function that writes a row of `step` and `loss` to CELL/progress.json for a measured step.

    The loss on plain training images is the mean cross-entropy without smoothing, in evaluation mode. Stochastic depth
    slows a training, and coupling changes while a model trains. Trainings are therefore also compared where they have equal
    training loss (`vit.statistics`), for which the loss of the training itself, with augmentation, mixing and dropped blocks,
    would not do.
    """
    split = data.train[balanced(data.train.labels, min(IMAGES, len(data.train)))]

    @torch.no_grad()
    def record(unit: xr.Dataset) -> None:
        step, parameter, training = int(unit["step"]), next(module.parameters()), module.training
        images, labels = (of.to(parameter.device) for of in (split.images, split.labels))
        module.eval()
        try:
            with torch.autocast(parameter.device.type, enabled=False):
                logits = module(data.normalise(images).to(parameter.dtype)).float()
                loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        finally:
            module.train(training)
        rows = [row for row in read(recipe.directory, "progress") or () if row["step"] < step]
        row = {"step": step, "loss": float(loss) / len(split)}
        write(recipe.directory, "progress", [*rows, row])

    return record


def _wandb(recipe: Recipe) -> WandbLogger | bool:
    """Start a W&B run named after the cell, offline if W&B can't be reached; return its logger."""
    mode = resolve_mode(recipe.wandb)
    if mode == "disabled":
        return False
    known = (read(recipe.directory, "wandb-run") or {}).get("id") if mode == "online" else None

    def start(mode: str) -> WandbLogger:
        logger = WandbLogger(
            recipe.cell,
            str(recipe.directory),
            id=known,
            project=recipe.project,
            group=recipe.data_name,
            tags=[f"wd{recipe.weight_decay:g}", f"sd{recipe.drop_path:g}"],
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


def _result(
    recipe: Recipe, module: Classifier, data: Data, device: torch.device, reason: str
) -> Row:
    last = {} if reason else module.history[-1]
    return {
        "schema": SCHEMA,
        "status": "diverged" if reason else "finished",
        "reason": reason,
        "accuracy": last.get("test/accuracy"),
        "loss": last.get("test/loss"),
        "images": {"train": len(data.train), "test": len(data.test)},
        # The accuracy of one answer for all
        "chance": float(torch.bincount(data.test.labels).max() / len(data.test)),
        "history": module.history,
        "recipe": recipe.identity,
        "environment": describe(module.model, device)
        | {
            f"{name}_version": package_version(name)
            for name in ("timm", "torchvision", "lightning")
        },
    }


class AtomicCheckpoints(TorchCheckpointIO):
    """Write checkpoints beside the file that they replace, and rename them.

    Lightning's own writes them in the directory of temporary files. From another file system, moving them is a copy, which a kill
    can leave incomplete, and the earlier checkpoint is lost.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint completely or not at all."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_atomic(Path(path), content.getbuffer())

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ValueError: if it is damaged.
        """
        try:
            return super().load_checkpoint(path, *arguments, **options)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{path} can't be read ({first_line(error)}); remove it, and the same command trains from the beginning"
            ) from error
