"""A model that calls attention and MLP by itself, in one of several ways, and the Jacobians between its boundaries."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.draws import integers
from tracker.blocks.find import find_blocks
from tracker.jacobians.rows import Jacobians
from tracker.jacobians.slicing import Rows
from tracker.model.global_state import preserve_global_state
from tracker.model.replica import Replica
from tracker.spans.recording import record_spans

L = 3
WIDTH = 8
CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self, norm: bool = True):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class MLP(nn.Sequential):
    def __init__(self, norm: bool = True):
        norms = [nn.LayerNorm(WIDTH)] if norm else []
        super().__init__(
            *norms, nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )


class Loop(nn.Module):
    """Calls attention and MLP by itself, in one of several ways."""

    def __init__(self, way: str = "pre-norm"):
        super().__init__()
        torch.manual_seed(0)
        inside = way not in ("outer norm", "in place")
        self.embed = nn.Embedding(20, WIDTH)
        self.latents = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(inside), MLP(inside)]) for _ in range(L)
        )
        self.norms = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]) for _ in range(L)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)
        self.way, self.passes, self.kept = way, 0, None

    def forward(self, ids):
        x = self.embed(ids)
        if self.way == "expanded":  # memory of a parameter, many times over
            x = self.latents.expand(*ids.shape, -1)
        first, beside = x, x.clone()
        for i, ((attention, mlp), (norm1, norm2)) in enumerate(
            zip(self.layers, self.norms, strict=True)
        ):
            if self.way == "outer norm":
                x = x + attention(norm1(x))
                x = x + mlp(norm2(x))
            elif self.way == "in place":
                x += attention(x)
                x = norm1(x)
                x += mlp(x)
                x = norm2(x)
            elif self.way == "kept in another tensor":
                beside = beside + attention(x)
                beside = beside + mlp(beside)
                x = beside.clone()
            elif self.way == "checkpointed":
                x = checkpoint(attention, x, use_reentrant=False) + x
                x = mlp(x) + x
            else:
                x = attention(x) + x
                x = mlp(x) + x
            if self.way == "first state again" and i:
                x = x + 0.1 * first
            if self.way == "random":
                x = x + torch.randn_like(x)
            if self.way == "counts":
                self.passes += 1
                x = x * self.passes
            if self.way == "keeps its first keys" and i == 1:
                self.kept = self.kept if self.kept is not None else x.mean(1, keepdim=True)
                x = x + self.kept
        return self.head(self.norm(x))


STARTS = [f"input of layers.{i}.0" for i in range(L)] + ["input of norm"]


def ids() -> Tensor:
    return integers(0, 20, 2, 6)


def states_in_one_graph(
    model: nn.Module, inputs: Tensor, boundaries: Sequence[str]
) -> list[Tensor]:
    """The very tensors that the caller's own model passes on, in one graph."""
    met = {}
    handles = []
    for text in boundaries:
        side, _, name = text.partition(" of ")
        module = model.get_submodule(name)
        if side == "input":
            handles.append(
                module.register_forward_pre_hook(
                    lambda m, args, text=text: met.__setitem__(text, args[0])
                )
            )
        else:
            handles.append(
                module.register_forward_hook(
                    lambda m, args, out, text=text: met.__setitem__(text, out)
                )
            )
    model(inputs)
    for handle in handles:
        handle.remove()
    return [met[text] for text in boundaries]


def found_by_spans(
    model: nn.Module, inputs: Tensor, blocks, rows: Rows, dtype=torch.float64
) -> list[Tensor]:
    with preserve_global_state(CPU):
        replica = Replica(model, find_blocks(model, blocks), dtype, CPU)
        calls = record_spans(replica, [inputs], {}).calls
        jacobians = Jacobians(replica)
        return [jacobians([(call, rows)])[0][0] for call in calls]
