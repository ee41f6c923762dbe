"""The loss on plain training images at every measured step: how far a training has come.

Stochastic depth slows a training, and coupling changes while a model trains. Trainings are therefore also compared where they
have equal training loss (`vit.statistics`), for which the loss of the training itself, with augmentation, mixing and dropped
blocks, would not do.
"""

import lightning
import torch
import xarray as xr
from torch import nn

from tracker.training.averaging import measured_module
from vit.cells import read, write
from vit.data import Data, balanced
from vit.loaders import TEST_BATCH
from vit.model import evaluating
from vit.recipe import Recipe

IMAGES = 1_000  # at most; balanced over classes and the same for every seed


class TrainingLoss(lightning.Callback):
    """Writes CELL/progress.json: a row of `step` and `loss` for each measured step.

    The loss is the mean cross-entropy without smoothing, in evaluation mode, of the weights that are measured.
    """

    def __init__(self, data: Data, recipe: Recipe):
        split = balanced(data.train, min(IMAGES, len(data.train)))
        self.data, self.images, self.labels = data, split.images, split.labels
        self.directory = recipe.directory
        self.weights = "raw" if recipe.ema is None else "averaged"

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Keep what the measurement does not pass on."""
        self.trainer, self.module = trainer, pl_module

    def record(self, unit: xr.Dataset) -> None:
        """Evaluate the model at the step of a measurement, and write the row."""
        step = int(unit["step"])
        module = measured_module(self, self.trainer, self.module, self.weights)
        rows = [row for row in read(self.directory, "progress") or () if row["step"] < step]
        write(self.directory, "progress", [*rows, {"step": step, "loss": self._loss(module)}])

    @torch.no_grad()
    def _loss(self, module: nn.Module) -> float:
        parameter = next(module.parameters())
        total = torch.zeros((), device=parameter.device)
        with evaluating(module), torch.autocast(parameter.device.type, enabled=False):
            for images, labels in zip(self.images.split(TEST_BATCH), self.labels.split(TEST_BATCH), strict=True):
                pixels = self.data.normalise(images.to(parameter.device)).to(parameter.dtype)
                logits = module(pixels).float()
                total += torch.nn.functional.cross_entropy(logits, labels.to(parameter.device), reduction="sum")
        return float(total) / len(self.labels)
