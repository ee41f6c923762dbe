"""Checks of code are made in two blocks of each kind, and what differs between blocks makes another kind."""

import pytest
import torch
from torch import nn

import tracker
from tests.plain import CausalAttention
from tracker.common.errors import UsageError
from tracker.jacobians import rows
from tracker.jacobians.kinds import Kinds

D = 8
MARK = 7.0


class Block(nn.Module):
    def __init__(self, layer_idx: int):
        super().__init__()
        self.layer_idx, self.scale, self.drop = layer_idx, 1.0, nn.Dropout(0.1 * layer_idx)
        self.norm, self.attn, self.mlp = nn.LayerNorm(D), CausalAttention(D), nn.Linear(D, D)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.drop(self.scale * self.mlp(x).tanh())


class Model(nn.Module):
    def __init__(self, depth: int = 5):
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def kinds(change=lambda blocks: None) -> list[int]:
    blocks = Model().blocks
    change(blocks)
    found = Kinds(blocks)
    return [found.of(block) for block in blocks]


CHANGES = {
    "an attribute": lambda blocks: setattr(blocks[2], "scale", 2.0),
    "a number that is no place": lambda blocks: [
        setattr(block, "width", n) for n, block in zip([4, 4, 2, 4, 4], blocks, strict=True)
    ],
    "a class": lambda blocks: setattr(blocks[2], "norm", nn.RMSNorm(D)),
    "a shape": lambda blocks: setattr(blocks[2], "mlp", nn.Linear(D, D, bias=False)),
    "a function": lambda blocks: setattr(blocks[2].mlp, "forward", lambda x: x),
    "a hook": lambda blocks: blocks[2].mlp.register_forward_hook(lambda *_: None),
    "an object": lambda blocks: [setattr(block, "own", object()) for block in (blocks[1], blocks[2])],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_code_depends_on_makes_another_kind(change):
    assert kinds() == [0] * 5
    assert 2 in [i for i, kind in enumerate(kinds(CHANGES[change])) if kind != 0]


def checked(monkeypatch, seed: int) -> tuple[list[str], list[str]]:
    """Return the blocks in which the derivative and the samples are checked."""
    of_derivative, of_samples = [], []
    derivative_error, find_mixing = rows.derivative_error, rows.find_mixing
    monkeypatch.setattr(
        rows,
        "derivative_error",
        lambda call, *rest: (of_derivative.append(call.name), derivative_error(call, *rest))[1],
    )
    monkeypatch.setattr(rows, "find_mixing", lambda call, at: (of_samples.append(call.name), find_mixing(call, at))[1])
    torch.manual_seed(seed)
    ds = tracker.measure(Model(), torch.randn(2, 6, D), k=2)
    monkeypatch.undo()
    errors = ds.diagnostics_derivative_error.values
    assert ((errors >= 0).all((0, 1)) == [name in of_derivative for name in ds.attrs["blocks"].split(", ")]).all()
    return of_derivative, of_samples


def test_the_first_block_of_a_kind_and_a_drawn_one_are_checked(monkeypatch):
    drawn = set()
    for seed in range(12):
        of_derivative, of_samples = checked(monkeypatch, seed)
        assert len(of_derivative) == len(of_samples) == 2
        assert of_derivative[0] == of_samples[0] == "blocks.0"
        drawn |= {*of_derivative[1:], *of_samples[1:]}
    assert len(drawn) > 2


def test_an_error_of_one_block_is_found_whatever_was_checked_in_others():
    """A derivative that is wrong in one block of a kind: its rows are compared with their values in every block."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 1.1 * gradient

    for layer in range(5):
        torch.manual_seed(0)
        model = Model()
        with torch.no_grad():
            model.blocks[layer].mlp.bias[0] = MARK

        def forward(self, x, plain=nn.Linear.forward):
            return Wrong.apply(plain(self, x)) if self.bias is not None and self.bias[0] == MARK else plain(self, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Linear, "forward", forward)
            with pytest.raises(UsageError, match=f"blocks.{layer}"):
                tracker.measure(model, torch.randn(2, 6, D), k=2, witness="off")
