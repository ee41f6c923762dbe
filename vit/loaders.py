"""Data loaders: uint8 images are gathered by index, moved to the device, and augmented, normalised and mixed there."""

import hashlib
from typing import Any

import lightning
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.mixup import Mixup
from torch import Tensor
from torch.utils.data import DataLoader

from tracker.linalg.transfer import copies_beside_work
from vit.augment import augment, erase, parse
from vit.data import Data
from vit.recipe import Recipe

TEST_BATCH = 1024


class Batches(lightning.LightningDataModule):
    """Training and test batches of a recipe, sharded over devices."""

    trainer: Any  # which Lightning sets

    def __init__(self, data: Data, recipe: Recipe):
        super().__init__()
        parse(recipe.rand_augment)  # refuses an invalid notation
        self.data, self.recipe = data, recipe
        self.mixup = None
        if recipe.mixup or recipe.cutmix:
            # The loss smooths labels, in the same way for mixed and for plain ones.
            self.mixup = Mixup(
                recipe.mixup, recipe.cutmix, label_smoothing=0.0, num_classes=len(data.classes)
            )

    def train_dataloader(self) -> DataLoader:
        """Return full batches, in an order that depends on seed and epoch only."""
        recipe, rank, world = self.recipe, self.trainer.global_rank, self.trainer.world_size
        order = Order(len(self.data.train), recipe.repeats, recipe.seed, rank, world)
        # Lightning sets the epoch too, but after a resumed run has fetched the first batch. At this point its `current_epoch` is
        # still that of the checkpoint.
        order.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return DataLoader(
            self.data.train,
            batch_size=recipe.batch_size // world,
            sampler=order,
            # Every iterator draws a seed. From the global state, a resumed epoch would make one draw more.
            generator=torch.Generator().manual_seed(recipe.seed),
            collate_fn=tuple,
            pin_memory=self._pins(),
            drop_last=True,
        )

    def val_dataloader(self) -> DataLoader:
        """Return the test split, each image once."""
        share = self.data.test[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(share, TEST_BATCH, collate_fn=tuple, pin_memory=self._pins())

    def on_after_batch_transfer(
        self, batch: tuple[Tensor, Tensor], dataloader_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Augment, normalise and mix a training batch; normalise a test batch."""
        images, labels = batch
        if not self.trainer.training:
            return self.data.normalise(images), labels
        mean, _ = self.data.statistics(images.device)
        images = self.data.normalise(augment(images, self.recipe, mean))
        if self.recipe.erasing:
            images = erase(images, self.recipe.erasing)
        return self.mixup(images, labels) if self.mixup else (images, labels)

    def _pins(self) -> bool:
        """Whether batches go to a device that copies asynchronously from pinned memory alone."""
        return copies_beside_work(self.trainer.strategy.root_device)


class Order(RepeatAugSampler):
    """timm's sampler for repeated augmentation, with a permutation that depends on the seed as well as the epoch.

    An epoch has as many draws as there are images: with r repeats it contains a different 1/r of the images, r times each.
    """

    def __init__(self, images: int, repeats: int, seed: int, rank: int, world: int):
        super().__init__(range(images), world, rank, num_repeats=repeats, selected_round=0)
        # So that every device has the same number of full batches
        self.num_selected_samples = images // world
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which selects the permutation."""
        super().set_epoch(derived_seed("order", self.seed, epoch))


def derived_seed(*parts: int | str) -> int:
    """Return a 32-bit random seed that is determined by its parts, so that a resumed run draws the same numbers.

    >>> derived_seed("epoch", 0, 1) == derived_seed("epoch", 1, 0)
    False
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")
