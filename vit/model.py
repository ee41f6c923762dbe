"""The model: timm's DeiT of configurable size, or any other timm model."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
from timm.layers.weight_init import trunc_normal_
from timm.models import VisionTransformer, create_model, is_model, list_models
from torch import nn

from vit.recipe import Recipe


class ModelError(ValueError):
    """The model is unknown, or does not fit the recipe or the data."""


def build(recipe: Recipe, classes: int) -> nn.Module:
    """Build the model of a recipe with random weights; by default DeiT-Ti for 32 x 32 pixels, with 5.36 M parameters.

    >>> model = build(Recipe(), classes=10)
    >>> len(model.blocks), model.embed_dim, model.pos_embed.shape[1]
    (12, 192, 65)

    Raises:
        ModelError: if timm has no model of the name, or it can't be built for, or does not take, the recipe's images.
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
    options = {"img_size": recipe.image_size, "patch_size": recipe.patch_size, "drop_path_rate": recipe.drop_path}
    images = torch.zeros(2, 3, recipe.image_size, recipe.image_size)
    while True:
        try:
            model = create_model(name, num_classes=classes, **options)
            with evaluating(model), torch.no_grad():
                model(images)
            return model
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
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
