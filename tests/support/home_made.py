"""Transformers as people write them by hand, most of them without a module that is named attention."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.attention import attend
from tests.support.models import HEADS, VOCABULARY, WIDTH

DEPTH, CONTEXT, HEAD = 3, 32, WIDTH // HEADS


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class PreNorm(nn.Module):
    """x + f(norm(x)) with any f."""

    def __init__(self, f: nn.Module):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(WIDTH), f

    def forward(self, x):
        return x + self.fn(self.norm(x))


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


class InPlace(Flat):
    """A block that adds to its state in place."""

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


CONTAINERS = {
    "ModuleList": nn.ModuleList,
    "Sequential": lambda blocks: nn.Sequential(*blocks),
    # Names that end in numbers would be found without the ModuleDict.
    "ModuleDict": lambda blocks: nn.ModuleDict({f"{i}th": block for i, block in enumerate(blocks)}),
}


class LM(Language):
    """A list of blocks that are called in turn, and a norm.

    Args:
        make: makes one of `DEPTH` blocks; or all blocks, and lists of blocks.
        container: one of `CONTAINERS`; a Sequential is called as a whole.
        before: modules that are registered and called before the list, by name.
        after: the same after it.
    """

    def __init__(
        self, make, container="ModuleList", sequence_first: bool = False, before=(), after=()
    ):
        super().__init__()
        blocks = [make() for _ in range(DEPTH)] if callable(make) else make
        modules = [*before, ("blocks", CONTAINERS[container](blocks)), *after]
        for name, module in modules:
            self.add_module(name, module)
        self.norm, self.sequence_first = nn.LayerNorm(WIDTH), sequence_first
        self.order = [name for name, _ in modules]

    def states(self, x):
        x = x.transpose(0, 1) if self.sequence_first else x
        for name in self.order:
            x = called(self.get_submodule(name), x)
        x = x.transpose(0, 1) if self.sequence_first else x
        return self.norm(x)


def called(module, x):
    """Call a module, or those of a list one after another."""
    if isinstance(module, nn.ModuleDict):
        module = nn.ModuleList(module.values())
    if not isinstance(module, nn.ModuleList):
        return module(x)
    for entry in module:
        x = called(entry, x)
    return x


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
    def __init__(self, block: type[nn.Module], other: type[nn.Module] = Torch):
        super().__init__()
        self.first = nn.ModuleList(block() for _ in range(2))
        self.second = nn.ModuleList(other() for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            y = called(self.first, x)
        return called(self.second, x) + y
