"""Blocks of attention and an MLP that adds anything, one after another in nn.Sequential."""

import torch
from torch import nn

import tracker
import tracker.jacobians.rows
from tests.support.draws import normal

D = 16
DTYPES = ["float32", "float64"]


class Block(nn.Module):
    """Attention and an MLP, `added(mlp, x)`."""

    def __init__(self, added=lambda mlp, x: mlp(x)):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp, self.other = nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Linear(D, D)
        self.added = added

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.added(self.mlp, x)


def network(*added, block=Block):
    torch.manual_seed(0)
    return nn.Sequential(*(block(*added) for _ in range(2))).eval()


def states(samples=1, n=6):
    return normal(samples, n, D)


def measured(net, x, dtype="float64", **options):
    return tracker.measure(net, x, dtype=dtype, k=3, blocks=["0", "1"], keep="jacobian", **options)


def detached_branch(mlp, x):
    return mlp(x.detach()) + 0.1 * x
