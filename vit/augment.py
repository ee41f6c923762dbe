"""DeiT's augmentation, applied to a whole batch on its device, with independent random draws for each image.

RandAugment is timm's `rand-m9-mstd0.5-inc1`: for each image and layer one of 15 operations, applied with probability 1/2, at
a level drawn around 9 of 10. Images that draw the same operation are transformed together, and the five geometric operations
share one resampling. A batch takes a few hundred small kernels; PIL would need one process per few hundred images a second.
Random choices are drawn on the CPU, so they are the same on every device, and sent there without waiting for it.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from timm.data import auto_augment
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from tracker.linalg.transfer import to_device
from vit.recipe import Recipe

Images = UInt8[Tensor, "b 3 h w"]
PerImage = Float[Tensor, " b"]
Change = Callable[[Tensor, Tensor, Tensor], Tensor]  # of images at levels and signed levels
# Of 10: at the full 10 timm's posterize keeps 0 bits, which Pillow 13 refuses with an exception.
HIGHEST_LEVEL = 9.999
ERASED_AREA, ERASED_ASPECT, ATTEMPTS = (0.02, 1 / 3), (0.3, 1 / 0.3), 10


def augment(images: Images, recipe: Recipe, mean: Float[Tensor, "3"]) -> Images:
    """Apply the recipe's padded crop, flip and RandAugment; `mean` (in [0, 1], on their device) fills uncovered pixels."""
    if recipe.crop_padding:
        images = padded_crop(images, recipe.crop_padding)
    if recipe.flip:
        (flipped,) = to_device(images.device, torch.rand(len(images)) < recipe.flip)
        images = torch.where(_per_image(flipped), images.flip(-1), images)
    return rand_augment(images, parse(recipe.rand_augment), mean)


def padded_crop(images: Images, padding: int) -> Images:
    """Pad each image with `padding` black pixels and take a random crop of the original size."""
    B, _, H, W = images.shape
    windows = F.pad(images, [padding]).unfold(2, H, 1).unfold(3, W, 1)
    ((top, left),) = to_device(images.device, torch.randint(2 * padding + 1, (2, B)))
    return windows[torch.arange(B, device=images.device), :, top, left].contiguous()


def erase(images: Float[Tensor, "b 3 h w"], probability: float) -> Float[Tensor, "b 3 h w"]:
    """Replace a random rectangle of 2 % to a third of the area of normalised images by Gaussian noise.

    The first of ten random rectangles that fits is used, as in timm (Zhong et al., 2017).
    """
    B, _, H, W = images.shape
    area = H * W * torch.empty(B, ATTEMPTS).uniform_(*ERASED_AREA)
    aspect = torch.empty(B, ATTEMPTS).uniform_(*map(math.log, ERASED_ASPECT)).exp()
    height, width = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (height < H) & (width < W)
    chosen = fits.int().argmax(1, keepdim=True)
    height, width = (side.gather(1, chosen).squeeze(1) for side in (height, width))
    erased = (torch.rand(B) < probability) & fits.any(1)
    top = (torch.rand(B) * (H - height + 1)).floor()
    left = (torch.rand(B) * (W - width + 1)).floor()
    erased, top, left, height, width = to_device(images.device, erased, top, left, height, width)
    inside = _within(top, height, H)[:, None, :, None] & _within(left, width, W)[:, None, None]
    return torch.where(inside & _per_image(erased), torch.randn_like(images), images)


def _within(first: PerImage, length: PerImage, side: int) -> Bool[Tensor, "b side"]:
    """Return which pixels of a side are among the `length` from the first on."""
    beyond = torch.arange(side, device=first.device) - first[:, None]
    return (beyond >= 0) & (beyond < length[:, None])


class RandAugment(NamedTuple):
    """A RandAugment policy: the operations, their probability, magnitude and its spread."""

    names: tuple[str, ...]
    layers: int
    probability: float
    magnitude: float
    spread: float


@cache
def parse(notation: str) -> RandAugment:
    """Parse timm's notation, such as rand-m9-mstd0.5-inc1, or "off".

    Raises:
        ValueError: if the notation is invalid, or names an operation that is not implemented.
    """
    if notation == "off":
        return RandAugment((), 0, 0.0, 0.0, 0.0)
    try:
        timm = auto_augment.rand_augment_transform(notation, {})
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f"--rand_augment {notation!r}: give timm's notation, such as rand-m9-mstd0.5-inc1, or off"
        ) from error
    first, names = timm.ops[0], tuple(op.name for op in timm.ops)
    if (
        not set(names) <= _CHANGES.keys() | _MOVES.keys()
        or timm.choice_weights is not None
        or first.magnitude_max
    ):
        raise ValueError(
            f"--rand_augment {notation}: the operations are those of the increasing set; give inc1, such as rand-m9-mstd0.5-inc1"
        )
    return RandAugment(names, timm.num_layers, first.prob, first.magnitude, first.magnitude_std)


def rand_augment(images: Images, policy: RandAugment, fill: Float[Tensor, "3"]) -> Images:
    """Apply one random operation at a random level per image and layer."""
    B = len(images)
    for _ in range(policy.layers):
        choice = torch.randint(len(policy.names), (B,))
        choice[torch.rand(B) >= policy.probability] = -1
        level = (policy.magnitude + policy.spread * torch.randn(B)).clamp(0, HIGHEST_LEVEL) / 10
        signed = torch.where(torch.rand(B) < 0.5, -level, level)
        images = apply(images, policy.names, choice, level, signed, fill)
    return images


def apply(
    images: Images,
    names: tuple[str, ...],
    choice: Int[Tensor, " b"],
    level: PerImage,
    signed: PerImage,
    fill: Float[Tensor, "3"],
) -> Images:
    """Apply to each image its chosen operation (-1: none), at its level in [0, 1] or, if geometric, its signed level."""
    images = images.clone()
    members = {name: (choice == i).nonzero().squeeze(1) for i, name in enumerate(names)}
    changes, moves = (
        {name: chosen for name, chosen in members.items() if name in group}
        for group in (_CHANGES, _MOVES)
    )
    # Level and signed level of each changed image, operation after operation, and the map of each moved one.
    changed, moved = (torch.cat([*group.values()]) for group in (changes, moves))
    side = images.shape[-1]
    maps = torch.cat([_MOVES[name](signed[chosen], side) for name, chosen in moves.items()])
    sent = to_device(images.device, changed, level[changed], signed[changed], moved, maps)
    changed, level, signed, moved, maps = sent
    counts = [*map(len, changes.values())]
    parts = (of.split(counts) for of in (changed, _per_image(level), _per_image(signed)))
    for name, chosen, *levels in zip(changes, *parts, strict=True):
        if len(chosen):
            images[chosen] = _CHANGES[name](images[chosen], *levels)
    if len(moved):
        images[moved] = move(images[moved], maps, fill)
    return images


def move(images: Images, maps: Float[Tensor, "b 2 3"], fill: Float[Tensor, "3"]) -> Images:
    """Resample images as PIL does with bicubic interpolation.

    Args:
        maps: the pixel at p of the output is the input at maps (p, 1), in pixels from the upper left corner; the centre of the
            first pixel is (1/2, 1/2).
        fill: colour of what lies outside of the input, in [0, 1].
    """
    H, W = images.shape[-2:]
    across, down = (torch.arange(side, device=images.device) + 0.5 for side in (W, H))
    terms = maps[..., None, None]
    x, y = (terms[:, :, 0] * across + terms[:, :, 1] * down[:, None] + terms[:, :, 2]).unbind(1)
    outside = ((x < 0) | (x >= W) | (y < 0) | (y >= H))[:, None]
    columns, after_column = _taps(x, W)
    rows, after_row = _taps(y, H)
    # 4 x 4 for each pixel
    nearest = (rows[:, :, None] * W + columns[:, None]).flatten(1)[:, None].expand(-1, 3, -1)
    values = images.flatten(2).gather(2, nearest).unflatten(2, (4, 4, H, W)).float()
    moved = _cubic(_cubic(values.movedim(3, 0), after_column[:, :, None]).movedim(2, 0), after_row)
    colour = (255 * fill).round()[:, None, None]
    return torch.where(outside, colour, moved.clamp(0, 255)).to(torch.uint8)


def _taps(position: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return the four nearest pixels, the border's where there is none, and the distance from the second of them."""
    centred = (position - 0.5)[:, None]
    first = centred.floor()
    offsets = torch.arange(-1, 3, device=position.device)[:, None, None]
    return (first.long() + offsets).clamp(0, side - 1), centred - first


def _cubic(values: Tensor, t: Tensor) -> Tensor:
    """Interpolate between the middle two of (4, ...) values by Keys' kernel with a = -1, in PIL's order of operations."""
    a, b, c, d = values
    return b + t * (c - a + t * (2 * (a - b) + c - d + t * (b - a + d - c)))


def _rotate(signed: PerImage, side: int) -> Float[Tensor, "b 2 3"]:
    angle = torch.deg2rad(30 * signed)
    cos, sin, centre = angle.cos(), angle.sin(), side / 2
    entries = [cos, -sin, centre * (1 - cos + sin), sin, cos, centre * (1 - cos - sin)]
    return torch.stack(entries, 1).unflatten(1, (2, 3))


def _along(row: int, column: int, amount: float) -> Callable[[PerImage, int], Tensor]:
    """Return a shear, or a shift by a share of the side: an operation that changes one entry of the identity map."""

    def maps(signed: PerImage, side: int) -> Float[Tensor, "b 2 3"]:
        maps = torch.eye(2, 3).repeat(len(signed), 1, 1)
        maps[:, row, column] = amount * (side if column == 2 else 1) * signed
        return maps

    return maps


# Signed level and side of the square images -> map.
_MOVES = {
    "Rotate": _rotate,
    "ShearX": _along(0, 1, 0.3),
    "ShearY": _along(1, 0, 0.3),
    "TranslateXRel": _along(0, 2, 0.45),
    "TranslateYRel": _along(1, 2, 0.45),
}


def _blend(nothing: Callable[[Tensor], Tensor]) -> Change:
    """Return an enhancement: the image without this property (`nothing`) blended with it by a factor per image, as PIL does."""

    def change(images: Tensor, _: Tensor, signed: Tensor) -> Tensor:
        degenerate = nothing(images).float()
        factor = (1 + 0.9 * signed).clamp(min=0.1)
        return (degenerate + factor * (images - degenerate)).clamp(0, 255).to(torch.uint8)

    return change


def _grey(images: Tensor) -> Tensor:
    """Return PIL's brightness in integers, (b, 1, h, w)."""
    weights = (19_595, 38_470, 7_471)  # of 2^16
    red, green, blue = (weight * images[:, i].int() for i, weight in enumerate(weights))
    return (red + green + blue + 2**15)[:, None] >> 16


def _mean_grey(images: Tensor) -> Tensor:
    pixels = _grey(images).flatten(1)
    count = pixels.shape[1]
    return _per_image((2 * pixels.sum(1) + count) // (2 * count))  # rounded, halves up


def _blurred(images: Tensor) -> Tensor:
    """Return torchvision's `adjust_sharpness(images, 0)`: PIL's SMOOTH filter, with the border as it is.

    The sums are exact, where TF32 would round a convolution, and there is no kernel to be copied from the host.
    """
    pixels = images.float()
    rows = pixels[..., :-2, :] + pixels[..., 1:-1, :] + pixels[..., 2:, :]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = pixels[..., 1:-1, 1:-1]
    inner.copy_(((box + 4 * inner) / 13).round_())
    return pixels


def _posterize(images: Tensor, level: Tensor, _: Tensor) -> Tensor:
    lost = 4 + (4 * level).int()
    return images & (256 - 2**lost).to(torch.uint8)


def _solarize(images: Tensor, level: Tensor, _: Tensor) -> Tensor:
    return torch.where(images >= 256 - (256 * level).int(), 255 - images, images)


def _solarize_add(images: Tensor, level: Tensor, _: Tensor) -> Tensor:
    brighter = (images + (110 * level).int()).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


_CHANGES: dict[str, Change] = {
    "AutoContrast": lambda images, *_: F.autocontrast(images),
    "Equalize": lambda images, *_: F.equalize(images),
    "Invert": lambda images, *_: F.invert(images),
    "PosterizeIncreasing": _posterize,
    "SolarizeIncreasing": _solarize,
    "SolarizeAdd": _solarize_add,
    "ColorIncreasing": _blend(_grey),
    "ContrastIncreasing": _blend(_mean_grey),
    "BrightnessIncreasing": _blend(torch.zeros_like),
    "SharpnessIncreasing": _blend(_blurred),
}


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]
