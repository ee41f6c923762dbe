"""The model: timm's DeiT of configurable size, any other timm model, or a caller's module."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
from timm.layers.weight_init import trunc_normal_
from timm.models import VisionTransformer, create_model, is_model, list_models
from torch import nn

from tracker.devices import raise_device_errors
from vit.recipe import Recipe


class ModelError(ValueError):
    """The model is unknown, or does not fit the recipe or the data."""


def build(recipe: Recipe, classes: int) -> nn.Module:
    """Build the model of a recipe with random weights; by default DeiT-Ti for 32 x 32 pixels, with 5.36 M parameters.

    >>> model = build(Recipe(), classes=10)
    >>> len(model.blocks), model.embed_dim, model.pos_embed.shape[1]
    (12, 192, 65)

    Raises:
        ModelError: if timm has no model of the name, or can't build it with the recipe's options.
    """
    return _deit(recipe, classes) if recipe.model is None else _named(recipe.model, recipe, classes)


def _deit(recipe: Recipe, classes: int) -> nn.Module:
    """Build a DeiT; its stochastic depth rate rises linearly over the blocks from 0."""
    model = create_model(
        "deit_tiny_patch16_224",
        img_size=recipe.image_size,
        patch_size=recipe.patch_size,
        embed_dim=recipe.width,
        depth=recipe.depth,
        num_heads=recipe.heads,
        drop_path_rate=recipe.drop_path,
        num_classes=classes,
    )
    assert isinstance(model, VisionTransformer) and model.cls_token is not None
    trunc_normal_(model.cls_token, std=0.02)  # as in DeiT; timm draws it with 1e-6
    return model


def _named(name: str, recipe: Recipe, classes: int) -> nn.Module:
    if not is_model(name):
        close = ", ".join(get_close_matches(name, list_models(), 3)) or "timm.list_models() names them"
        raise ModelError(f"--model {name}: timm has no model of this name; the nearest: {close}")
    options = {
        "img_size": recipe.image_size,
        "patch_size": recipe.patch_size,
        "drop_path_rate": recipe.drop_path,
    }
    while True:
        try:
            return create_model(name, num_classes=classes, **options)
        except (TypeError, ValueError, AssertionError) as error:
            refused = re.search(r"argument '(\w+)'", str(error))
            if not refused or refused[1] not in options:
                raise ModelError(
                    f"--model {name} can't be built for images of {recipe.image_size} pixels and patches of "
                    f"{recipe.patch_size} ({error}); give other --image_size or --patch_size"
                ) from error
            if options.pop(refused[1]) and refused[1] == "drop_path_rate":
                raise ModelError(f"--drop_path {recipe.drop_path}: {name} has no stochastic depth; give 0") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Set a model to evaluation; at the end, set each part back to its own mode."""
    training = {part: part.training for part in model.modules()}
    try:
        yield model.eval()
    finally:
        for part, mode in training.items():
            part.training = mode


@torch.no_grad()
def check_output(model: nn.Module, classes: int, side: int) -> None:
    """Check that a model takes an image and returns one logit for each class.

    Raises:
        ModelError: if it does not.
    """
    name, parameter = type(model).__name__, next(model.parameters(), torch.zeros(()))
    try:
        with evaluating(model):
            logits = model(torch.zeros(2, 3, side, side, dtype=parameter.dtype, device=parameter.device))
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise_device_errors(error)
        raise ModelError(f"{name} does not take images of the shape (2, 3, {side}, {side}): {error}") from error
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if shape != (2, classes):
        raise ModelError(f"{name} returns {shape} for 2 images; give a model that returns logits, (2, {classes})")


def structure(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that identify the types of a model's modules and the shapes of its weights."""
    modules = [(name, type(part).__qualname__) for name, part in model.named_modules()]
    shapes = [(name, tuple(value.shape)) for name, value in (*model.named_parameters(), *model.named_buffers())]
    return hashlib.blake2b(repr((modules, shapes)).encode(), digest_size=8).hexdigest()
