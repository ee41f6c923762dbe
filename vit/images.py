"""Labelled images: those of a split in memory, and those of a source before they are decoded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int, UInt8
from PIL.Image import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F


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


class Source(NamedTuple):
    """One split before its images are decoded: the class indices of all images, and a function that decodes some.

    `read` takes indices, (n), and the side in pixels; it returns uint8 images, (n, 3, side, side).
    """

    labels: Int[Tensor, " n"]
    read: Callable[[Int[Tensor, " n"], int], UInt8[Tensor, "n 3 side side"]]

    def decoded(self, index: Int[Tensor, " n"], side: int) -> Split:
        """Decode the images of some indices."""
        return Split(self.read(index, side), self.labels[index])


def balanced(split: Split, size: int) -> Split:
    """Select `size` images, balanced over classes, in a random order; selection and order are fixed."""
    return split[balanced_index(split.labels, size)]


def balanced_index(labels: Int[Tensor, " n"], size: int) -> Int[Tensor, " size"]:
    """Return the indices of `balanced`."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    labels = labels[order]
    # The r-th image of every class comes before the (r+1)-th of any.
    rank = torch.empty_like(labels)
    for c in labels.unique():
        rank[labels == c] = torch.arange(int((labels == c).sum()))
    return order[torch.argsort(rank, stable=True)[:size]]


def stretched(images: UInt8[Tensor, "n 3 h w"], side: int) -> UInt8[Tensor, "n 3 side side"]:
    """Resize images to squares."""
    return images if images.shape[-2:] == (side, side) else F.resize(images, [side, side], antialias=True)


def square(image: Any, side: int) -> UInt8[Tensor, "3 side side"]:
    """Resize an image's shorter side, and crop its centre.

    Args:
        image: a PIL image, or an array or tensor of grey levels: uint8, or floating in [0, 1]; one channel or three.

    Raises:
        DataError: if it is anything else.
    """
    try:
        pixels = F.to_image(image.convert("RGB") if isinstance(image, Image) else image)
    except TypeError as error:
        raise DataError(f"an image is a {type(image).__name__}; give PIL images, arrays or tensors") from error
    if pixels.ndim != 3 or len(pixels) not in (1, 3):
        raise DataError(f"an image has the shape {tuple(pixels.shape)}; give (1 or 3, height, width)")
    if pixels.is_floating_point():
        if not (pixels.min() >= 0 and pixels.max() <= 1):
            raise DataError(
                f"pixels lie between {float(pixels.min()):.3g} and {float(pixels.max()):.3g}; give images without normalisation, "
                "uint8 or in [0, 1]: the training normalises and augments them itself"
            )
        pixels = F.to_dtype(pixels, torch.uint8, scale=True)
    elif pixels.dtype != torch.uint8:
        raise DataError(f"pixels have the dtype {pixels.dtype}; give uint8, or floating in [0, 1]")
    pixels = pixels.as_subclass(Tensor).expand(3, -1, -1)
    return F.center_crop(F.resize(pixels, [side], antialias=True), [side])
