"""Transformers as people write them by hand, most of them without a module that is named attention."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.attention import attend
from tests.support.models import HEADS, VOCABULARY, WIDTH

DEPTH, CONTEXT, HEAD = 3, 32, WIDTH // HEADS


class MLP(nn.Module):
    def __init__(self, inner: int = 2 * WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class PreNorm(nn.Module):
    """x + f(norm(x)) with any f."""

    def __init__(self, f: nn.Module):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(WIDTH), f

    def forward(self, x):
        return x + self.fn(self.norm(x))


class CausalSelfAttention(nn.Module):
    """As in nanoGPT."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(attend(self.c_attn(x), HEADS, causal=True))


class NanoBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A ModuleDict, and a forward that returns logits and loss."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList(NanoBlock() for _ in range(DEPTH)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx, targets=None):
        parts = self.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1]))
        for block in parts["h"]:  # type: ignore[union-attr]
            x = block(x)
        return self.lm_head(parts["ln_f"](x)), None


class Head(nn.Module):
    """One head, with a softmax written by hand."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, HEAD, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(CONTEXT, CONTEXT)))

    def forward(self, x):
        n, k, q = x.shape[1], self.key(x), self.query(x)
        scores = q @ k.transpose(-2, -1) * HEAD**-0.5
        return scores.masked_fill(self.tril[:n, :n] == 0, -math.inf).softmax(-1) @ self.value(x)


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(Head() for _ in range(HEADS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class LectureBlock(nn.Module):
    """A list of heads inside every block."""

    def __init__(self):
        super().__init__()
        self.sa, self.ffwd = MultiHead(), MLP()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


class SA(nn.Module):
    """Attention by einsum, with parameters of its own instead of linear layers."""

    def __init__(self, causal: bool = True):
        super().__init__()
        self.qkv = nn.Parameter(0.2 * torch.randn(3, HEADS, WIDTH, HEAD))
        self.out = nn.Parameter(0.2 * torch.randn(HEADS, HEAD, WIDTH))
        self.causal = causal

    def forward(self, x):
        q, k, v = torch.einsum("bnd,ahde->abhne", x, self.qkv)
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(HEAD)
        if self.causal:
            scores = scores.masked_fill(
                torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf
            )
        return torch.einsum("bhqk,bhke,hed->bqd", scores.softmax(-1), v, self.out)


class Flat(nn.Module):
    """A block without parts: its own projections and functional attention."""

    def __init__(self, causal: bool = True, sequence_first: bool = False):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.causal, self.sequence_first = causal, sequence_first

    def forward(self, x):
        x = x.transpose(0, 1) if self.sequence_first else x
        x = x + self.out(attend(self.qkv(self.ln_1(x)), HEADS, self.causal))
        x = x + self.down(F.gelu(self.up(self.ln_2(x))))
        return x.transpose(0, 1) if self.sequence_first else x


class ZeroStart(Flat):
    """A block whose projections to the stream start at zero, and that adds to the state in place."""

    def __init__(self):
        super().__init__()
        for linear in (self.out, self.down):
            nn.init.zeros_(linear.weight)

    def forward(self, x):
        x += self.out(attend(self.qkv(self.ln_1(x)), HEADS, causal=True))
        x += self.down(F.gelu(self.up(self.ln_2(x))))
        return x


class Torch(nn.Module):
    """`nn.MultiheadAttention` under another name."""

    def __init__(self):
        super().__init__()
        self.norm, self.other_tokens = (
            nn.LayerNorm(WIDTH),
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        )
        self.mlp = PreNorm(MLP())

    def forward(self, x):
        h = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.mlp(x + self.other_tokens(h, h, h, attn_mask=mask, need_weights=False)[0])


class Wrapped(nn.Module):
    """A module around another one, by default a block, that passes on whatever it is called with."""

    def __init__(self, inner: nn.Module | None = None):
        super().__init__()
        self.inner = Flat() if inner is None else inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Language(nn.Module):
    """An embedding and a head, around what `states` makes of the embedded tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.states(self.embed(ids)))


class LM(Language):
    """A list of blocks that are called in turn, and a norm."""

    def __init__(self, make, container=nn.ModuleList, sequence_first: bool = False):
        super().__init__()
        self.blocks, self.norm = container([make() for _ in range(DEPTH)]), nn.LayerNorm(WIDTH)
        self.sequence_first = sequence_first

    def states(self, x):
        x = x.transpose(0, 1) if self.sequence_first else x
        for block in (
            self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks
        ):
            x = block(x)
        x = x.transpose(0, 1) if self.sequence_first else x
        return self.norm(x)


class Sequential(LM):
    """Blocks in an nn.Sequential that is called as a whole."""

    def __init__(self, make):
        super().__init__(make, lambda blocks: nn.Sequential(*blocks))

    def states(self, x):
        return self.norm(self.blocks(x))


class Numbered(Language):
    """Blocks that are attributes: block0, block1, block2."""

    def __init__(self):
        super().__init__()
        for i in range(DEPTH):
            setattr(self, f"block{i}", Flat())
        self.norm = nn.LayerNorm(WIDTH)

    def states(self, x):
        for i in range(DEPTH):
            x = getattr(self, f"block{i}")(x)
        return self.norm(x)


class Pairs(Language):
    """A list of [attention, MLP] that the model calls itself, as in vit-pytorch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([SA(), MLP()]) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)

    def states(self, x):
        for mix, feed in self.layers:  # type: ignore[misc]
            x = x + mix(x)
            x = x + feed(x)
        return self.norm(x)


class Columns(Language):
    """All attentions in one list and all MLPs in another."""

    def __init__(self):
        super().__init__()
        self.mix, self.feed = (
            nn.ModuleList(SA() for _ in range(DEPTH)),
            nn.ModuleList(MLP() for _ in range(DEPTH)),
        )

    def states(self, x):
        for mix, feed in zip(self.mix, self.feed, strict=True):
            x = x + mix(x)
            x = x + feed(x)
        return x


class Towers(Language):
    """Two chains of blocks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(Flat(causal=False) for _ in range(DEPTH)))
        self.decoder = nn.Sequential(*(Flat() for _ in range(DEPTH + 1)))

    def states(self, x):
        return self.decoder(x + self.encoder(x).mean(1, keepdim=True))


class Ensemble(Language):
    """Stages of two blocks: the stages keep the shape as well."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Flat(), Flat()) for _ in range(2))

    def states(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Residual2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_1, self.conv_2 = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.conv_2(F.relu(self.conv_1(x)))


class ViT(nn.Module):
    """A convolutional stem of residual blocks, blocks with attention, a stack of MLPs, and a head of MLPs."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.stem = nn.Sequential(*(Residual2d() for _ in range(3)))
        self.layers = nn.ModuleList(Flat(causal=False) for _ in range(DEPTH))
        self.mlps = nn.Sequential(*(PreNorm(MLP()) for _ in range(4)))
        self.head = nn.Sequential(MLP(), MLP(), nn.Linear(WIDTH, 5))

    def forward(self, images):
        x = self.stem(self.patches(images)).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.mlps(x).mean(1))


class TwoTowers(nn.Module):
    def __init__(self, block: type[nn.Module]):
        super().__init__()
        self.first = nn.ModuleList(block() for _ in range(2))
        self.second = nn.ModuleList(Torch() for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            y = x.mean(1, keepdim=True)
            for block in self.first:
                y = block(y)
        for block in self.second:
            x = block(x)
        return x + y
