"""GPT-2 in plain PyTorch, as people write it, with the weights of Hugging Face's; with final norms and heads of several forms."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
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


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.before, self.attn = nn.LayerNorm(width), CausalAttention(width)
        self.between, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class RootMeanSquare(nn.Module):
    """RMSNorm as written by hand, under a name that does not say norm."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Standardize(nn.LayerNorm):
    """A LayerNorm whose class is called something else."""


class PlainGPT2(nn.Module):
    """GPT-2 without a Hugging Face class.

    Args:
        source: the model whose weights it takes.
        norm: makes the final norm, which takes the weights of the source's if it is a LayerNorm; None: it is computed by a
            function, without a module.
        head: maps the normed states to logits: f(model, states).
    """

    def __init__(
        self,
        source: transformers.GPT2LMHeadModel,
        norm: Callable[[int], nn.Module] | None = nn.LayerNorm,
        head: Callable[["PlainGPT2", Tensor], Tensor] | None = None,
    ):
        super().__init__()
        config = source.config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.n_positions, config.n_embd)
        self.layers = nn.ModuleList(Layer(config.n_embd) for _ in range(config.n_layer))
        self.last = norm(config.n_embd) if norm else None
        self.logits = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.logits.weight = self.tokens.weight
        self.head = head or (lambda model, x: model.logits(x))
        self.copy(source.transformer)

    def copy(self, source: nn.Module):
        """Take the weights of Hugging Face's model, whose linear layers hold their weights transposed."""
        pairs = [
            (self.tokens, source.wte),
            (self.places, source.wpe),
        ]
        for mine, its in zip(self.layers, source.h, strict=True):
            pairs += [(mine.before, its.ln_1), (mine.between, its.ln_2)]
            pairs += [(mine.attn.qkv, its.attn.c_attn), (mine.attn.out, its.attn.c_proj)]
            pairs += [(mine.up, its.mlp.c_fc), (mine.down, its.mlp.c_proj)]
        if isinstance(self.last, nn.LayerNorm):
            pairs.append((self.last, source.ln_f))
        with torch.no_grad():
            for mine, its in pairs:
                transposed = isinstance(its, transformers.pytorch_utils.Conv1D)
                mine.weight.copy_(its.weight.T if transposed else its.weight)
                if getattr(mine, "bias", None) is not None:
                    mine.bias.copy_(its.bias)

    def states(self, ids: Tensor) -> Tensor:
        """Return what the last block returns."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.states(ids)
        x = F.layer_norm(x, x.shape[-1:]) if self.last is None else self.last(x)
        return self.head(self, x)
