"""Image data sets in memory, as uint8 (N, 3, side, side), with the statistics that normalise them.

`--data` names CIFAR10, scikit-learn's digits or a folder. All images are decoded before training starts, so that a damaged file
is found at once and not an hour later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms.v2 import functional as F

from tracker.common.files import cache_root
from vit.recipe import Recipe


class DataError(ValueError):
    """The data is missing, damaged, or unsuitable for the settings."""


@dataclass
class Split(Dataset):
    """The images of one split with their class indices; a loader gathers those of a whole batch at once."""

    images: UInt8[Tensor, "n 3 side side"]
    labels: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Split":
        return Split(self.images[index], self.labels[index])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(indices)
        return self.images[index], self.labels[index]


class Source(NamedTuple):
    """One split before its images are decoded: the class indices of all images, and a function that decodes some.

    `read` takes indices, (n), and the side in pixels; it returns uint8 images, (n, 3, side, side).
    """

    labels: Int[Tensor, " n"]
    read: Callable[[Int[Tensor, " n"], int], UInt8[Tensor, "n 3 side side"]]

    def decoded(self, index: Int[Tensor, " n"], side: int) -> Split:
        """Decode the images of some indices."""
        return Split(self.read(index, side), self.labels[index])


Sources = tuple[Source, Source, list[str]]  # training images, test images, names of the classes


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
            raise DataError(
                f"--probe_size {size}; there are fewer test images: give at most {len(self.test)}"
            )
        return self.normalise(self.test.images[balanced(self.test.labels, size)])


def load(recipe: Recipe) -> Data:
    """Load the data set of a recipe.

    Raises:
        DataError: if it is missing, damaged, or smaller than the recipe needs.
    """
    kind, _, path = recipe.data.partition(":")
    if kind == "cifar10":
        return prepared(_cifar10(recipe.data_dir or cache_root()), recipe)
    return prepared(_digits() if kind == "digits" else _folder(Path(path).expanduser()), recipe)


def prepared(sources: Sources, recipe: Recipe) -> Data:
    """Decode the images that a recipe uses.

    Raises:
        DataError: if an image is damaged, or if there are fewer than the recipe needs.
    """
    train, test = _splits(sources[0], sources[1], recipe)
    if recipe.batch_size > len(train):
        raise DataError(
            f"--batch_size {recipe.batch_size}; there are fewer training images: give at most {len(train)}"
        )
    mean, std = statistics(train.images)
    if not (std > 0).all():
        raise DataError(
            f"{recipe.data}: a channel of the training images is constant; give other images"
        )
    return Data(train, test, sources[2], mean.float(), std.float())


def statistics(images: UInt8[Tensor, "n 3 h w"]) -> tuple[Float[Tensor, "3"], Float[Tensor, "3"]]:
    """Return the mean and standard deviation of each channel in [0, 1], exact in float64, from the counts of grey levels."""
    level = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack(
        [torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]
    ).double()
    mean = counts @ level / counts.sum(1)
    variance = (counts * (level - mean[:, None]).square()).sum(1) / (counts.sum(1) - 1)
    return mean, variance.sqrt()


def _splits(train: Source, test: Source, recipe: Recipe) -> tuple[Split, Split]:
    size, side = recipe.train_size, recipe.image_size
    used = everything = torch.arange(len(train.labels))
    if size is not None:
        if size > len(everything):
            raise DataError(
                f"--train_size {size}; {recipe.data} has fewer training images: give at most {len(everything)}"
            )
        used = balanced(train.labels, size)
    tested = test.decoded(torch.arange(len(test.labels)), side)
    if recipe.test_unused:
        added = train.decoded(everything[torch.isin(everything, used, invert=True)], side)
        tested = Split(
            torch.cat([tested.images, added.images]), torch.cat([tested.labels, added.labels])
        )
    return train.decoded(used, side), tested


def balanced(labels: Int[Tensor, " n"], size: int) -> Int[Tensor, " size"]:
    """Return the indices of `size` images, balanced over classes, in a random order; selection and order are fixed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    labels = labels[order]
    # The r-th image of every class comes before the (r+1)-th of any.
    rank = torch.empty_like(labels)
    for c in labels.unique():
        rank[labels == c] = torch.arange(int((labels == c).sum()))
    return order[torch.argsort(rank, stable=True)[:size]]


def _cifar10(root: Path) -> Sources:
    try:
        CIFAR10(root, download=True)
    except (URLError, TimeoutError, ConnectionError) as error:
        raise DataError(
            f"CIFAR10 is missing, incomplete or damaged in {root}, and can't be downloaded ({error}); go online, put a complete "
            f"{CIFAR10.filename} there, give --data_dir, or use --data digits, which needs no network"
        ) from error
    except RuntimeError as error:
        raise DataError(
            f"CIFAR10 was downloaded to {root}, but its checksum is wrong ({error}); remove {CIFAR10.filename} and try again"
        ) from error
    splits = [CIFAR10(root, train) for train in (True, False)]
    train, test = (
        _in_memory(torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), split.targets)
        for split in splits
    )
    return train, test, splits[0].classes


def _digits() -> Sources:
    """Load scikit-learn's digits, 8 x 8 pixels in 17 grey levels, with a balanced fifth as the test split."""
    from sklearn.datasets import load_digits

    pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    images = (pixels.view(-1, 1, 8, 8) * 255 / 16).round().byte().repeat(1, 3, 1, 1)
    order = balanced(labels, len(labels))
    test, train = (_in_memory(images[of], labels[of]) for of in (order[:360], order[360:]))
    return train, test, [*"0123456789"]


def _in_memory(images: UInt8[Tensor, "n 3 h w"], labels: Tensor | list[int]) -> Source:
    """Return the source of square images, which are resized."""
    return Source(
        torch.as_tensor(labels), lambda index, side: F.resize(images[index], [side, side])
    )


def _folder(path: Path) -> Sources:
    """List PATH/train and PATH/test or PATH/val."""
    train, test = (_listing(path, names) for names in (("train",), ("test", "val")))
    if train.classes != test.classes:
        differing = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(
            f"--data folder:{path}: train and test must have the same classes, but differ in {differing}"
        )
    return _files(train), _files(test), train.classes


def _listing(path: Path, names: Sequence[str]) -> ImageFolder:
    directory = next((path / name for name in names if (path / name).is_dir()), path / names[0])
    try:
        return ImageFolder(str(directory))
    except FileNotFoundError as error:
        layout = " or ".join(f"{path / name}/CLASS/*.png" for name in names)
        raise DataError(f"--data folder:{path}: {layout} is needed ({error})") from error


def _files(listing: ImageFolder) -> Source:
    """Return the source of image files: the shorter side is resized, and the centre is cropped."""

    def read(index: Int[Tensor, " n"], side: int) -> UInt8[Tensor, "n 3 side side"]:
        images = torch.empty(len(index), 3, side, side, dtype=torch.uint8)
        for row, i in enumerate(index.tolist()):
            file, _ = listing.samples[i]
            try:
                pixels = F.pil_to_tensor(listing.loader(file))
            except (OSError, SyntaxError) as error:  # PIL raises either for a damaged image
                raise DataError(f"{file} can't be read ({error}); fix or remove it") from error
            images[row] = F.center_crop(F.resize(pixels, [side]), [side])
        return images

    return Source(torch.tensor(listing.targets), read)
