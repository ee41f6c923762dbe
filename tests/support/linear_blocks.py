"""A language model whose blocks are linear, in any basis and scale."""

import torch
from torch import nn


class Attention(nn.Module):
    """The mean of the tokens so far, times a matrix."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None] @ self.matrix.mT


class LinearBlock(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.attention, self.mlp = Attention(attention), nn.Linear(*mlp.shape, bias=False)
        self.mlp.weight = nn.Parameter(mlp)

    def forward(self, x):
        return x + self.attention(x) + self.mlp(x)


class LinearBlocks(nn.Module):
    """A language model whose blocks are linear; Q turns the basis of its states, and two factors scale states and blocks."""

    def __init__(self, Q=None, of_states=1.0, of_blocks=1.0):
        super().__init__()
        torch.manual_seed(0)
        table, head, *matrices = (
            torch.randn(20, 12),
            torch.randn(20, 12),
            *0.3 * torch.randn(6, 12, 12),
        )
        Q = torch.eye(12) if Q is None else Q
        self.embed, self.head = nn.Embedding(20, 12), nn.Linear(12, 20, bias=False)
        self.embed.weight, self.head.weight = (
            nn.Parameter(of_states * table @ Q.mT),
            nn.Parameter(head @ Q.mT),
        )
        turned = [of_blocks * Q @ M @ Q.mT for M in matrices]
        self.blocks = nn.ModuleList(
            LinearBlock(*pair) for pair in zip(turned[:3], turned[3:], strict=True)
        )
        self.norm = nn.RMSNorm(12)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
