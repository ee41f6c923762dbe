"""Parts of language models in plain PyTorch, as people write them, and a random GPT-2 of Hugging Face's."""

import torch
import transformers
from torch import Tensor, nn

from tests.support.attention import attend
from tests.support.draws import perturbed

HEADS = 4


def gpt2(
    depth: int = 4, width: int = 48, vocabulary: int = 60, seed: int = 0
) -> transformers.GPT2LMHeadModel:
    """Return a random GPT-2 whose norms and biases are not the identity."""
    config = transformers.GPT2Config(
        n_embd=width,
        n_layer=depth,
        n_head=HEADS,
        n_positions=32,
        vocab_size=vocabulary,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return perturbed(transformers.GPT2LMHeadModel(config), seed + 1)


class CausalAttention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attend(self.qkv(x), HEADS, causal=True))


class RootMeanSquare(nn.Module):
    """RMSNorm as written by hand, under a name that does not say norm."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
