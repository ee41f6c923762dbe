"""The model: timm's DeiT, sized by options; stochastic depth rises linearly over the blocks from 0 to its rate."""

from timm.models import VisionTransformer, create_model

from vit.recipe import Recipe


def build(recipe: Recipe, classes: int) -> VisionTransformer:
    """A DeiT with random weights; the defaults of Recipe make it DeiT-Ti for 32 x 32 pixels: 5.36 M parameters.

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
    assert isinstance(model, VisionTransformer)
    return model
