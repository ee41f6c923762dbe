"""Language models whose loop over blocks can be another one; they are asked about their blocks' derivatives."""

from collections.abc import Callable

from torch import Tensor, nn

from tests.support.draws import integers
from tests.support.plain import CausalAttention

D = 16
IDS = integers(0, 30, 3, 7)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(D), CausalAttention(D), nn.Linear(D, D)

    def f(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return self.mlp(self.norm(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Model(nn.Module):
    """Blocks of one class; `step` says what one does to the state, in the model's forward."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(30, D)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.outside = nn.ModuleList(nn.Linear(D, 1) for _ in range(depth))

    def step(self, l: int, x: Tensor) -> Tensor:
        return self.blocks[l](x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for l in range(len(self.blocks)):
            x = self.step(l, x)
        return x


class Gated(Block):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + gate * self.f(x)


class WithGates(Model):
    """Blocks that are given something beside their state."""

    def __init__(self):
        super().__init__(Gated)


class Mixing(WithGates):
    """The first state is mixed in by each block, as a constant."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.embedding(ids)
        for block in self.blocks:
            x = block(x, first)
        return x
