"""Image data sets in memory, as uint8 (N, 3, side, side), with the statistics that normalise them.

All images are decoded before training starts, so that a damaged file is found at once and not an hour later.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from vit.images import DataError, Source, Split, balanced, balanced_index
from vit.recipe import Recipe
from vit.sources import Sources, from_datasets, open_source


@dataclass
class Data:
    """Both splits, with the mean and standard deviation of the training pixels by channel, in [0, 1]."""

    train: Split
    test: Split
    classes: list[str]
    mean: Float[Tensor, "3"]
    std: Float[Tensor, "3"]
    _statistics: dict[torch.device, Float[Tensor, "2 3"]] = field(default_factory=dict, repr=False)

    def statistics(self, device: torch.device) -> Float[Tensor, "2 3"]:
        """Return mean and standard deviation on a device, to which they are copied once."""
        if device not in self._statistics:
            self._statistics[device] = torch.stack([self.mean, self.std]).to(device)
        return self._statistics[device]

    def normalise(self, images: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 h w"]:
        """Convert pixels to the model's input: float32 with mean 0 and standard deviation 1."""
        mean, std = self.statistics(images.device)[..., None, None]
        return F.to_dtype(images, torch.float32, scale=True).sub_(mean).div_(std)

    def probe(self, size: int) -> Float[Tensor, "b 3 h w"]:
        """Return the test images to measure on: balanced over classes, and the same for every seed."""
        if size > len(self.test):
            raise DataError(f"--probe_size {size}: the test split has {len(self.test)} images; give at most that")
        return self.normalise(balanced(self.test, size).images)


def load(recipe: Recipe) -> Data:
    """Load the data set of a recipe.

    Raises:
        DataError: if it is missing, damaged, or smaller than the recipe needs.
    """
    return prepared(open_source(recipe), recipe)


def given_data(data: Any, recipe: Recipe) -> Data:
    """Return data that a caller gave: `Data` as it is, or a pair of datasets for training and test.

    Raises:
        DataError: if it is neither, or does not fit the recipe.
    """
    if isinstance(data, Data):
        side = data.train.images.shape[-1]
        if side != recipe.image_size:
            raise DataError(f"data has images of {side} pixels; give a recipe with image_size={side}")
        if recipe.train_size is not None:
            raise DataError(f"train_size={recipe.train_size}: vit.Data is used whole; leave train_size out")
        _check_count(data.train, recipe)
        return data
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise DataError(f"data is a {type(data).__name__}; give a pair of datasets (training, test), or vit.Data")
    return prepared(from_datasets(*data), recipe)


def fingerprint(data: Data) -> str:
    """Return 16 hexadecimal digits that identify the images and labels of both splits."""
    digest = hashlib.blake2b(digest_size=8)
    for split in (data.train, data.test):
        digest.update(repr(tuple(split.images.shape)).encode())
        for values in (split.images, split.labels):
            digest.update(values.contiguous().numpy().data)
    return digest.hexdigest()


def prepared(sources: Sources, recipe: Recipe) -> Data:
    """Decode the images that a recipe uses.

    Raises:
        DataError: if an image is damaged, or if there are fewer than the recipe needs.
    """
    train, test = _splits(sources[0], sources[1], recipe)
    _check_count(train, recipe)
    mean, std = _statistics(train.images)
    if not (std > 0).all():
        raise DataError(f"{recipe.data}: a channel of the training images is constant; give other images")
    return Data(train, test, sources[2], mean.float(), std.float())


def _check_count(train: Split, recipe: Recipe) -> None:
    if recipe.batch_size > len(train):
        raise DataError(
            f"--batch_size {recipe.batch_size}: {len(train)} training images do not fill a batch; give at most {len(train)}"
        )


def _statistics(images: UInt8[Tensor, "n 3 h w"]) -> tuple[Float[Tensor, "3"], Float[Tensor, "3"]]:
    """Return the mean and standard deviation of each channel in [0, 1], exact in float64, from the counts of grey levels."""
    level = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    mean = counts @ level / counts.sum(1)
    variance = (counts * (level - mean[:, None]).square()).sum(1) / (counts.sum(1) - 1)
    return mean, variance.sqrt()


def _splits(train: Source, test: Source, recipe: Recipe) -> tuple[Split, Split]:
    every, side = torch.arange(len(test.labels)), recipe.image_size
    if recipe.train_size is None:
        return train.decoded(torch.arange(len(train.labels)), side), test.decoded(every, side)
    used, tested = _selected(train.labels, recipe), test.decoded(every, side)
    if recipe.test_unused:
        unused = torch.full((len(train.labels),), True).index_fill_(0, used, False)
        rest = train.decoded(torch.nonzero(unused).flatten(), side)
        tested = Split(torch.cat([tested.images, rest.images]), torch.cat([tested.labels, rest.labels]))
    return train.decoded(used, side), tested


def _selected(labels: Int[Tensor, " n"], recipe: Recipe) -> Int[Tensor, " train_size"]:
    assert recipe.train_size is not None
    if recipe.train_size > len(labels):
        raise DataError(
            f"--train_size {recipe.train_size}: {recipe.data} has {len(labels)} training images; give at most that"
        )
    return balanced_index(labels, recipe.train_size)
