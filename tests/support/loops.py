"""A model that calls attention and MLP by itself, in one of several ways, and the Jacobians between its boundaries."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.attention import attend
from tests.support.draws import integers
from tracker.jacobians.rows import Jacobians
from tracker.jacobians.slicing import Rows
from tracker.model.description import Blocks
from tracker.model.global_state import preserve_global_state
from tracker.model.replica import Replica
from tracker.spans.recording import record_spans

L = 3
WIDTH = 8
CPU = torch.device("cpu")


class Mixer(nn.Module):
    """Attention under another name."""

    def __init__(self, norm: bool = True, sequence_first: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sequence_first = sequence_first

    def forward(self, x):
        if self.sequence_first:
            return self.mix(x.transpose(0, 1)).transpose(0, 1)
        return self.mix(x)

    def mix(self, x):
        return self.out(attend(self.qkv(self.norm(x))))


class MLP(nn.Sequential):
    def __init__(self, norm: bool = True):
        norms = [nn.LayerNorm(WIDTH)] if norm else []
        super().__init__(
            *norms, nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )


class Block(nn.ModuleList):
    """Attention and MLP in one module."""

    def forward(self, x):
        for part in self:
            x = part(x) + x
        return x


class Loop(nn.Module):
    """Calls attention and MLP by itself, in one of several ways; `way` also says what else it does."""

    def __init__(self, way: str = "pre-norm"):
        super().__init__()
        torch.manual_seed(0)
        inside = way not in ("outer norm", "in place", "post-norm")
        holder = Block if way == "in modules" else nn.ModuleList
        self.embed = nn.Embedding(20, WIDTH)
        self.latents = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(
            holder([Mixer(inside, way == "sequence first"), MLP(inside)]) for _ in range(L)
        )
        self.norms = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]) for _ in range(L)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)
        self.way, self.passes, self.kept = way, 0, None
        if way == "called twice":
            self.layers[1] = self.layers[0]

    def forward(self, ids):
        way = self.way
        x = ids if ids.is_floating_point() else self.embed(ids)
        if way == "expanded":  # memory of a parameter, many times over
            x = self.latents.expand(*ids.shape, -1)
        x = x.transpose(0, 1) if way == "sequence first" else x
        first, beside, update = x, x.clone(), x
        add = Tensor.add_ if way == "in place" else Tensor.add
        if way == "halves a weight":
            with torch.no_grad():
                self.layers[1][1][-1].weight.div_(2)
        for i, (block, (norm1, norm2)) in enumerate(zip(self.layers, self.norms, strict=True)):
            attention, mlp = block
            if way == "in modules":
                x = block(x)
            elif way == "outer norm":
                x = x + attention(norm1(x))
                x = x + mlp(norm2(x))
            elif way in ("in place", "post-norm"):
                x = norm1(add(x, attention(x)))
                x = norm2(add(x, mlp(x)))
            elif way == "kept in another tensor":
                beside = beside + attention(x)
                beside = beside + mlp(beside)
                x = beside.clone()
            elif way == "checkpointed":
                x = checkpoint(attention, x, use_reentrant=False) + x
                x = mlp(x) + x
            else:
                x = attention(x) + x
                update = mlp(x)
                x = update + x
            if way == "first state again" and i:
                x = x + 0.1 * first
            if way == "a little around the state" and not i:
                x = x + 0.01 * beside
            if way == "random":
                x = x + torch.randn_like(x)
            if way == "counts":
                self.passes += 1
                x = x * self.passes
            if way == "keeps its first keys" and i == 1:
                self.kept = self.kept if self.kept is not None else x.mean(1, keepdim=True)
                x = x + self.kept
        logits = self.head(self.norm(x))
        beside_logits = {
            "returns a mask": torch.ones_like(ids).to(x),
            "returns an early state": first,
            "returns the update": update,
            "returns what depends on an early state, too": logits + first.mean(),
        }
        if way in beside_logits:
            return logits, beside_logits[way]
        return {"returns nothing": None, "returns the first state": first}.get(way, logits)


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

        def keep(module, args, output, text=text, side=side):
            met[text] = args[0] if side == "input" else output

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    model(inputs)
    for handle in handles:
        handle.remove()
    return [met[text] for text in boundaries]


def found_by_spans(model: nn.Module, inputs: Tensor, blocks: Blocks, rows: Rows) -> list[Tensor]:
    """Return the Jacobians of each span at some rows, in float64."""
    with preserve_global_state(CPU):
        replica = Replica(model, blocks, torch.float64, CPU)
        calls = record_spans(replica, [inputs], {}).calls
        jacobians = Jacobians(replica)
        return [jacobians([(call, rows)])[0][0] for call in calls]
