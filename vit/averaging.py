"""The exponential moving average of the weights."""

from typing import Any

import lightning
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MovingAverage(WeightAveraging):
    """Lightning's EMAWeightAveraging with all weights averaged by a few kernels.

    The number of averaged steps, which is read at every step, is kept on the CPU.
    """

    def __init__(self, decay: float):
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(decay))

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Create the averaged model."""
        super().setup(trainer, pl_module, stage)
        averaged: Any = self._average_model  # Lightning has no public access
        averaged.n_averaged = averaged.n_averaged.cpu()
