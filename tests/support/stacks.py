"""Models without an embedding: blocks one after another, and a measurement of them."""

from torch import nn

import tracker
from tests.support.models import random


class Attention(nn.Module):
    """Holds the word that `find_blocks` looks for; rows do not mix."""


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def measured(model):
    return tracker.measure(model, random(1, 4, 8), k=3, dtype="float64")
