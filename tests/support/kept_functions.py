"""A model whose blocks reach their MLP through a function that they keep."""

import torch
from torch import nn

from tests.support.models import random
from tests.support.plain import CausalAttention
from tests.support.stacks import Stack

D = 8
INPUTS = random(2, 5, D, seed=1)


def over_self(block):
    return lambda x: block.mlp(x)


class Block(nn.Module):
    """A block that reaches its MLP through a function that it keeps."""

    def __init__(self, keep=over_self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), CausalAttention(D)
        self.mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Dropout(0.5))
        self.kept = keep(self)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        kept = self.kept["f"] if isinstance(self.kept, dict) else self.kept
        return x + kept(x)

    def through_mlp(self, x, sign=1.0):
        return sign * self.mlp(x)


def model_of(keep=over_self, seed=0):
    """Return a model of two blocks; as a function that is kept, by default a lambda over the block."""
    torch.manual_seed(seed)
    return Stack([Block(keep) for _ in range(2)])
