"""Image data sets in memory, as uint8 (N, 3, side, side): CIFAR10, scikit-learn's digits, or a folder.

All images are decoded before training starts, so that a damaged file is found at once and not an hour later.
"""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms.v2 import functional as F

from checkpoints.files import cache_root
from vit.recipe import Recipe


class DataError(ValueError):
    """The data is missing, damaged, or unsuitable for the settings."""


@dataclass
class Split:
    """The images of one split with their class indices."""

    images: UInt8[Tensor, "n 3 side side"]
    labels: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Split":
        return Split(self.images[index], self.labels[index])


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
    if recipe.data == "cifar10":
        train, test, classes = _cifar10(recipe.data_dir or cache_root())
    elif recipe.data == "digits":
        train, test, classes = _digits()
    else:
        train, test, classes = _folder(Path(recipe.data.removeprefix("folder:")).expanduser(), recipe.image_size)
    train, test = (Split(_resized(split.images, recipe.image_size), split.labels) for split in (train, test))
    if recipe.train_size is not None:
        if recipe.train_size > len(train):
            raise DataError(
                f"--train_size {recipe.train_size}: {recipe.data} has {len(train)} training images; give at most that"
            )
        train = balanced(train, recipe.train_size)
    if recipe.batch_size > len(train):
        raise DataError(
            f"--batch_size {recipe.batch_size}: {len(train)} training images do not fill a batch; give at most {len(train)}"
        )
    pixels = train.images.transpose(0, 1).reshape(3, -1)
    # float32 loses the fifth digit of a mean over 50 million pixels.
    std, mean = torch.std_mean(pixels.double() / 255, dim=1)
    if not (std > 0).all():
        raise DataError(f"{recipe.data}: a channel of the training images is constant; give other images")
    return Data(train, test, classes, mean.float(), std.float())


def balanced(split: Split, size: int) -> Split:
    """Select `size` images, balanced over classes, in a random order; selection and order are fixed."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    labels = split.labels[order]
    # The r-th image of every class comes before the (r+1)-th of any.
    rank = torch.empty_like(labels)
    for c in labels.unique():
        rank[labels == c] = torch.arange(int((labels == c).sum()))
    return split[order[torch.argsort(rank, stable=True)[:size]]]


def _cifar10(root: Path) -> tuple[Split, Split, list[str]]:
    archive = root / CIFAR10.filename
    found = archive.exists() or (root / CIFAR10.base_folder).exists()
    try:
        CIFAR10(root, download=True)
    except (URLError, TimeoutError, ConnectionError) as error:
        if found:
            raise DataError(
                f"CIFAR10 in {root} is damaged or incomplete (its checksums differ), and can't be downloaded again "
                f"({error}); remove it and go online, or put a complete {CIFAR10.filename} there"
            ) from error
        raise DataError(
            f"CIFAR10 is not in {root} and can't be downloaded ({error}); go online, put {CIFAR10.filename} there, give "
            "--data_dir, or use --data digits, which needs no network"
        ) from error
    except RuntimeError as error:
        raise DataError(
            f"CIFAR10 was downloaded to {root}, but its checksum is wrong ({error}); remove {archive} and try again"
        ) from error
    splits = [CIFAR10(root, train) for train in (True, False)]
    train, test = (
        Split(torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(split.targets))
        for split in splits
    )
    return train, test, list(splits[0].classes)


def _digits() -> tuple[Split, Split, list[str]]:
    """Load scikit-learn's digits, 8 x 8 pixels in 17 grey levels, with a balanced fifth as the test split."""
    from sklearn.datasets import load_digits

    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = torch.from_numpy(np.round(pixels.reshape(-1, 1, 8, 8) * 255 / 16).astype(np.uint8))
    whole = Split(images.repeat(1, 3, 1, 1), torch.from_numpy(labels).long())
    mixed = balanced(whole, len(whole))
    return mixed[slice(360, None)], mixed[slice(360)], [str(digit) for digit in range(10)]


def _folder(path: Path, side: int) -> tuple[Split, Split, list[str]]:
    splits, names = [], []
    for part in ("train", "test"):
        try:
            listing = ImageFolder(str(path / part))
        except FileNotFoundError as error:
            raise DataError(f"--data folder:{path}: {path / part}/CLASS/*.png is needed ({error})") from error
        names.append(listing.classes)
        images = []
        for file, _ in listing.samples:
            try:
                image = listing.loader(file)
            except (OSError, SyntaxError) as error:  # PIL raises either for a damaged image
                raise DataError(f"{file} can't be read ({error}); fix or remove it") from error
            images.append(F.center_crop(F.resize(F.pil_to_tensor(image), [side], antialias=True), [side]))
        splits.append(Split(torch.stack(images), torch.tensor(listing.targets)))
    if names[0] != names[1]:
        differing = sorted(set(names[0]) ^ set(names[1]))
        raise DataError(f"--data folder:{path}: train and test must have the same classes, but differ in {differing}")
    return splits[0], splits[1], names[0]


def _resized(images: UInt8[Tensor, "n 3 h w"], side: int) -> UInt8[Tensor, "n 3 side side"]:
    return images if images.shape[-1] == side else F.resize(images, [side, side], antialias=True)
