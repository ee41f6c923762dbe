"""Models of the published shapes with random weights, which need no download."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from checkpoints.configuration import pythia_shapes

VOCABULARY = 512  # embeddings are not timed
# Side of the images and of the patches, in pixels
IMAGES = {"deit-ti": (32, 4), "deit-ti-224": (224, 16)}
SEED = 0


def model(
    shape: str,
    blocks: int | None,
    device: str,
    vocabulary: int = VOCABULARY,
    weights: str = "float32",
) -> nn.Module:
    """Return the model, with its first `blocks` blocks if given; `weights` is the dtype of its parameters."""
    torch.manual_seed(SEED)
    dtype = getattr(torch, weights)
    with torch.device(device):  # large models initialise slowly on a CPU
        if shape in IMAGES:
            import timm

            pixels, patch = IMAGES[shape]
            return (
                timm.create_model(
                    "deit_tiny_patch16_224",
                    img_size=pixels,
                    patch_size=patch,
                    num_classes=10,
                    depth=blocks or 12,
                )
                .to(dtype)
                .eval()
            )
        from transformers import AutoModelForCausalLM

        whole = pythia_shapes()[shape]
        config = replace(whole, layers=blocks or whole.layers, vocabulary=vocabulary).config()
        # A model converted afterwards would need the memory of both dtypes.
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def inputs(shape: str, tokens: int, prompts: int) -> Tensor:
    """Return random images, or prompts of `tokens` tokens."""
    generator = torch.Generator().manual_seed(SEED)
    if shape in IMAGES:
        pixels, _ = IMAGES[shape]
        return torch.randn(prompts, 3, pixels, pixels, generator=generator)
    return torch.randint(0, VOCABULARY, (prompts, tokens), generator=generator)


def length(shape: str, tokens: int) -> int:
    """Return the length n of the sequence; for an image, its patches and the class token."""
    if shape not in IMAGES:
        return tokens
    pixels, patch = IMAGES[shape]
    return (pixels // patch) ** 2 + 1


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks in order."""
    modules = model.get_submodule("blocks" if hasattr(model, "blocks") else "gpt_neox.layers")
    return list(modules.children())


def position(shape: str) -> int:
    """Return the position of the token whose Jacobians are measured: the class token, or the last token."""
    return 0 if shape in IMAGES else -1
