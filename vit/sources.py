"""The data sets that `--data` names: CIFAR10, scikit-learn's digits, a folder, a Hugging Face data set; and any two datasets."""

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder

from tracker.common.files import cache_root
from tracker.common.text import first_line
from vit.images import DataError, Source, Split, balanced, square, stretched
from vit.recipe import Recipe

Sources = tuple[Source, Source, list[str]]  # training images, test images, names of the classes


def open_source(recipe: Recipe) -> Sources:
    """Find the images of a recipe's data set.

    Raises:
        DataError: if they are missing or damaged.
    """
    kind, _, name = recipe.data.partition(":")
    if kind == "cifar10":
        return _cifar10(recipe.data_dir or cache_root())
    if kind == "digits":
        return _digits()
    return _folder(Path(name).expanduser()) if kind == "folder" else _hugging_face(name)


def from_datasets(train: Any, test: Any) -> Sources:
    """Take the images of two map-style datasets of (image, class index), such as torchvision's.

    Every image is read once here, whatever number the recipe uses, because only that gives its label.

    Raises:
        DataError: if an item is anything else.
    """
    train_source, test_source = (_read_once(dataset) for dataset in (train, test))
    named = [str(name) for name in getattr(train, "classes", ())]
    highest = int(torch.cat([train_source.labels, test_source.labels]).max())
    classes = named if len(named) > highest else [str(i) for i in range(highest + 1)]
    return train_source, test_source, classes


def _read_once(dataset: Any) -> Source:
    name = type(dataset).__name__
    rows = [_row(dataset, name, i) for i in range(len(dataset))]
    if not rows:
        raise DataError(f"{name} has no images; give a training and a test set with some")
    labels = torch.tensor([label for _, label in rows])
    return Source(labels, _reader(lambda i: rows[i][0], lambda i: f"item {i} of {name}"))


def _row(dataset: Any, name: str, i: int) -> tuple[Any, int]:
    try:
        image, label = dataset[i]
        index = operator.index(label)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"item {i} of {name} is not (image, class index) ({error}); give such datasets, as torchvision's are"
        ) from error
    if index < 0:
        raise DataError(f"item {i} of {name} has class {index}; give classes from 0")
    return image, index


def _reader(read: Callable[[int], Any], name: Callable[[int], str]) -> Callable[[Tensor, int], Tensor]:
    """Return a function that decodes images one at a time; `read` returns one, and `name` names it in messages."""

    def decode(index: Int[Tensor, " n"], side: int) -> UInt8[Tensor, "n 3 side side"]:
        out = torch.empty(len(index), 3, side, side, dtype=torch.uint8)
        for row, i in enumerate(index.tolist()):
            try:
                out[row] = square(read(i), side)
            except DataError as error:
                raise DataError(f"{name(i)}: {error}") from error
            except (OSError, SyntaxError) as error:  # PIL raises either for a damaged image
                raise DataError(f"{name(i)} can't be read ({error}); fix or remove it") from error
        return out

    return decode


def _in_memory(split: Split) -> Source:
    return Source(split.labels, lambda index, side: stretched(split.images[index], side))


def _cifar10(root: Path) -> Sources:
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
        _in_memory(Split(torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(split.targets)))
        for split in splits
    )
    return train, test, list(splits[0].classes)


def _digits() -> Sources:
    """Load scikit-learn's digits, 8 x 8 pixels in 17 grey levels, with a balanced fifth as the test split."""
    from sklearn.datasets import load_digits

    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = torch.from_numpy(np.round(pixels.reshape(-1, 1, 8, 8) * 255 / 16).astype(np.uint8))
    whole = Split(images.repeat(1, 3, 1, 1), torch.from_numpy(labels).long())
    mixed = balanced(whole, len(whole))
    return _in_memory(mixed[slice(360, None)]), _in_memory(mixed[slice(360)]), [str(digit) for digit in range(10)]


def _folder(path: Path) -> Sources:
    """List PATH/train and PATH/test or PATH/val."""
    train, test = (_listing(path, names) for names in (("train",), ("test", "val")))
    if train.classes != test.classes:
        differing = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(f"--data folder:{path}: train and test must have the same classes, but differ in {differing}")
    return _files(train), _files(test), train.classes


def _files(listing: ImageFolder) -> Source:
    files = [file for file, _ in listing.samples]
    return Source(torch.tensor(listing.targets), _reader(lambda i: listing.loader(files[i]), files.__getitem__))


def _listing(path: Path, names: Sequence[str]) -> ImageFolder:
    directory = next((path / name for name in names if (path / name).is_dir()), path / names[0])
    try:
        return ImageFolder(str(directory))
    except FileNotFoundError as error:
        wanted = " or ".join(f"{path / name}/CLASS/*.png" for name in names)
        raise DataError(f"--data folder:{path}: {wanted} is needed ({error})") from error


def _hugging_face(name: str) -> Sources:
    """Load NAME or NAME:LABEL, a data set of the hub or a local directory, with the package `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"--data hf:{name} needs the package datasets: pip install 'block-coupling-tracker[prompts]'"
        ) from error
    from datasets.exceptions import DatasetNotFoundError

    repository, _, wanted = name.partition(":")
    try:
        found: Any = datasets.load_dataset(repository)
    except (DatasetNotFoundError, OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise DataError(
            f"--data hf:{name}: {repository} can't be loaded ({reason}); check the name, go online once, or give a local "
            "directory of that layout"
        ) from error
    test = next((split for split in ("test", "validation", "valid", "val") if split in found), None)
    if "train" not in found or test is None:
        raise DataError(f"--data hf:{name} has the splits {', '.join(found)}; it needs train, and test or validation")
    features = found["train"].features
    image = _column(name, features, datasets.Image, "")
    label = _column(name, features, datasets.ClassLabel, wanted)
    sources = [_rows(found[split], image, label, f"--data hf:{name}, {split}") for split in ("train", test)]
    return sources[0], sources[1], list(features[label].names)


def _column(name: str, features: Any, kind: type, wanted: str) -> str:
    """Return the name of the only column of a type, or of the one that was asked for."""
    columns = [column for column, feature in features.items() if isinstance(feature, kind)]
    if wanted in columns:
        return wanted
    if wanted or len(columns) != 1:
        found = f"its columns of type {kind.__name__} are {', '.join(columns) or 'none'} (all: {', '.join(features)})"
        several = (
            f"; choose one: hf:{name.partition(':')[0]}:{columns[0]}" if columns and kind.__name__ != "Image" else ""
        )
        raise DataError(f"--data hf:{name}: {found}{several}")
    return columns[0]


def _rows(split: Any, image: str, label: str, name: str) -> Source:
    labels = torch.tensor(split[label][:])
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"{name}: some images have no label (-1); give a split whose labels are public")
    return Source(labels, _reader(split[image].__getitem__, lambda i: f"{name}: image {i}"))
