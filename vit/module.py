"""The LightningModule: loss, optimiser, schedule, accuracy, and the state that makes a resumed run exact."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning
import torch
from timm.optim._optim_factory import create_optimizer_v2
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tracker.common.text import duration, first_line
from vit.cells import write
from vit.loaders import derived_seed
from vit.model import build
from vit.recipe import Recipe

# CUDA graphs. With `fallback_random`, stochastic depth draws the same numbers as uncompiled. Kernels that cast weights are
# combined. Kernels whose rounding depends on the choice are not chosen by timing.
GRAPHS: dict[str, Any] = {
    "triton.cudagraphs": True,
    "fallback_random": True,
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
    "deterministic": True,
}


class DivergedError(FloatingPointError):
    """The training loss is not finite."""


class Classifier(lightning.LightningModule):
    """A recipe's model in training; `history` has a row per finished epoch and is saved in checkpoints."""

    def __init__(
        self, recipe: Recipe, classes: int, steps_per_epoch: int, print_epochs: bool = False
    ):
        super().__init__()
        self.recipe, self.steps_per_epoch, self.print_epochs = recipe, steps_per_epoch, print_epochs
        self.model = build(recipe, classes)
        self.train_loss, self.test_loss = (MeanMetric(nan_strategy="disable") for _ in range(2))
        # Validation would read every label.
        self.accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False)
        self.history: list[dict[str, float]] = []
        self.started = 0.0
        self.compiled: Callable[[Tensor], Tensor] | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(images)

    def on_train_start(self) -> None:
        """Write the settings, after which the directory is theirs: data and model are known to fit, and to be measurable."""
        if self.trainer.is_global_zero:
            write(self.recipe.directory, "recipe", self.recipe.identity)
        wanted = self.recipe.compile
        if wanted is None:
            wanted = self.device.type == "cuda" and self.trainer.world_size == 1
        if wanted:
            self._compile()

    def _compile(self) -> None:
        """Compile the model in training, or print why it can't be compiled; its modules and weights stay as they are.

        Random numbers drawn here do not matter, since every epoch is seeded; gradients are discarded.
        """
        torch.compiler.reset()  # what an earlier training of this process compiled
        size = self.recipe.batch_size, 3, *[self.recipe.image_size] * 2
        images = next(self.parameters()).new_zeros(size)
        try:
            compiled = torch.compile(self.model.forward, dynamic=False, options=GRAPHS)
            for _ in range(3):  # graphs are compiled, recorded and replayed
                with self.trainer.precision_plugin.train_step_context():
                    logits = compiled(images)
                self.zero_grad()  # the next graph reuses their memory
                logits.sum().backward()
            self.compiled = compiled
        except RuntimeError as error:
            print(
                f"the training goes on without torch.compile: {first_line(error)}", file=sys.stderr
            )
        self.zero_grad()

    def on_train_epoch_start(self) -> None:
        """Seed the random numbers of this epoch from seed, epoch and rank."""
        seed = derived_seed("epoch", self.recipe.seed, self.current_epoch, self.global_rank)
        lightning.seed_everything(seed, verbose=False)
        self.started = time.perf_counter()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Compute the cross-entropy with class indices, or with the mixed distributions of mixup and cutmix."""
        images, targets = batch
        logits = (self.compiled or self)(images)
        loss = torch.nn.functional.cross_entropy(
            logits, targets, label_smoothing=self.recipe.label_smoothing
        )
        self.train_loss.update(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        """Update top-1 accuracy and loss on the test split."""
        images, labels = batch
        logits = self(images)
        self.accuracy.update(logits, labels)
        self.test_loss.update(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))

    def on_train_epoch_end(self) -> None:
        """Append the epoch to the history, in memory and on disk.

        Raises:
            DivergedError: if the training loss is not finite.
        """
        train_loss, epoch = float(self.train_loss.compute()), self.current_epoch + 1
        if not math.isfinite(train_loss):
            raise DivergedError(f"the training loss is {train_loss} in epoch {epoch}")
        row = {"train/loss": train_loss, "lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        tested = self.accuracy.update_called
        if tested:
            row |= {
                "test/loss": float(self.test_loss.compute()),
                "test/accuracy": float(self.accuracy.compute()),
            }
        self.log_dict(row)
        seconds = time.perf_counter() - self.started
        self.history.append({"epoch": epoch, "step": self.global_step, "seconds": seconds, **row})
        for metric in (self.train_loss, self.test_loss, self.accuracy):
            metric.reset()
        if self.trainer.is_global_zero:
            write(self.recipe.directory, "history", self.history)
            if self.print_epochs:
                left = seconds * (self.recipe.epochs - epoch)
                accuracy = f", test accuracy {row['test/accuracy']:.4f}" if tested else ""
                self.print(
                    f"epoch {epoch}/{self.recipe.epochs}: loss {train_loss:.3f}{accuracy}  "
                    f"({seconds:.1f} s, about {duration(left)} left)"
                )
                sys.stdout.flush()

    def configure_optimizers(self) -> Any:
        """Return AdamW with timm's parameter groups, and a cosine schedule with warm-up, updated every step."""
        recipe = self.recipe
        optimizer = create_optimizer_v2(
            self.model,
            "adamw",
            lr=recipe.lr * recipe.batch_size / 512,
            weight_decay=recipe.weight_decay,
            # With clipping Lightning refuses it
            fused=(self.device.type == "cuda" and not recipe.clip) or None,
        )
        scheduler, _ = create_scheduler_v2(
            optimizer,
            "cosine",
            num_epochs=recipe.epochs,
            warmup_epochs=recipe.warmup_epochs,
            warmup_lr=recipe.warmup_lr,
            min_lr=recipe.min_lr,
            step_on_epochs=False,
            updates_per_epoch=self.steps_per_epoch,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step timm's scheduler, which takes the number of updates so far."""
        scheduler.step_update(num_updates=self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the history."""
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the history."""
        self.history = checkpoint["history"]
