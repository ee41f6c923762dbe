"""Models of the published shapes with random weights, which need no download."""

import torch
from torch import Tensor, nn

PYTHIA = {  # width, blocks, heads
    "14m": (128, 6, 4),
    "31m": (256, 6, 8),
    "70m": (512, 6, 8),
    "160m": (768, 12, 12),
    "410m": (1024, 24, 16),
    "1b": (2048, 16, 8),
    "1.4b": (2048, 24, 16),
    "2.8b": (2560, 32, 32),
    "6.9b": (4096, 32, 32),
    "12b": (5120, 36, 40),
}
CONTEXT = 2048
VOCABULARY = 512  # embeddings are not timed
PIXELS, PATCH = 32, 4
SEED = 0


def model(shape: str, blocks: int | None, device: str, vocabulary: int = VOCABULARY) -> nn.Module:
    """Return the model, with its first `blocks` blocks if given."""
    torch.manual_seed(SEED)
    with torch.device(device):  # large models initialise slowly on a CPU
        if shape == "deit-ti":
            import timm

            name, depth = "deit_tiny_patch16_224", blocks or 12
            return timm.create_model(name, img_size=PIXELS, patch_size=PATCH, num_classes=10, depth=depth).eval()
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        width, depth, heads = PYTHIA[shape]
        config = GPTNeoXConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=blocks or depth,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            max_position_embeddings=CONTEXT,
            use_parallel_residual=True,
        )
        return GPTNeoXForCausalLM(config).eval()


def inputs(shape: str, tokens: int, prompts: int) -> Tensor:
    """Return random images, or prompts of `tokens` tokens."""
    generator = torch.Generator().manual_seed(SEED)
    if shape == "deit-ti":
        return torch.randn(prompts, 3, PIXELS, PIXELS, generator=generator)
    return torch.randint(0, VOCABULARY, (prompts, tokens), generator=generator)


def length(shape: str, tokens: int) -> int:
    """Return the length n of the sequence; for an image, its patches and the class token."""
    return (PIXELS // PATCH) ** 2 + 1 if shape == "deit-ti" else tokens


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks in order."""
    found = model.get_submodule("blocks" if hasattr(model, "blocks") else "gpt_neox.layers")
    return list(found.children())


def position(shape: str) -> int:
    """Return the position of the token whose Jacobians are measured: the class token, or the last token."""
    return 0 if shape == "deit-ti" else -1
