"""The model: timm's DeiT of configurable size."""

from timm.layers.weight_init import trunc_normal_
from timm.models import VisionTransformer, create_model
from torch import nn

from vit.recipe import Recipe


def build(recipe: Recipe, classes: int) -> nn.Module:
    """Build the DeiT of a recipe with random weights; by default DeiT-Ti for 32 x 32 pixels, with 5.36 M parameters.

    The stochastic depth rate rises linearly over the blocks from 0.

    >>> model = build(Recipe(), classes=10)
    >>> len(model.blocks), model.embed_dim, model.pos_embed.shape[1]
    (12, 192, 65)
    """
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
