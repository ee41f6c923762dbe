"""What a model computes, block by block: its states, its Jacobians and their mis-couplings, by code that is not the tracker's."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def states_of(
    model: nn.Module,
    inputs: Any,
    blocks: Sequence[nn.Module],
    change: Callable[[int, Tensor], Tensor] = lambda l, x: x,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a model; return what each block is given, before its own pre-hooks, and what it returns, after its own hooks.

    Args:
        inputs: a tensor, or tensors by the name of an argument.
        change: returns the state that block l, from 0, is given in place of another.
    """
    x: list[Tensor] = []
    y: list[Tensor] = []

    def enter(block: nn.Module, args: tuple) -> tuple:
        state = change(len(x), args[0].clone())
        needs_graph = torch.is_grad_enabled() and not state.requires_grad
        x.append(state.requires_grad_() if needs_graph else state)
        return x[-1].clone(), *args[1:]  # the block may write to its input

    def leave(block: nn.Module, args: tuple, output: Any):
        y.append((output[0] if isinstance(output, tuple) else output).clone())

    handles = [block.register_forward_pre_hook(enter, prepend=True) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    if isinstance(inputs, Mapping):
        model(**inputs)
    else:
        model(inputs)
    for handle in handles:
        handle.remove()
    return x, y


class Truth:
    """States and Jacobians by gradients in the graph of one pass of the model.

    Each sample passes d times, and copy i stands for coordinate i of the output: one backward pass from a block's output to its
    input gives the Jacobians of all samples there. What else a block is given is constant.

    Args:
        model: in eval mode; all its weights will have gradients.
        inputs: B samples, in the dtype of the model: a tensor, or tensors by the name of an argument.
        blocks: the names of the L blocks, whose first argument is the state.
        d: the width.
        norm: the name of the final norm, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor | Mapping[str, Tensor],
        blocks: Sequence[str],
        d: int,
        norm: str = "",
    ):
        self.model, self.L, self.d = model.requires_grad_(), len(blocks), d
        self.blocks = [model.get_submodule(block) for block in blocks]
        self.norm = model.get_submodule(norm) if norm else None
        self.inputs = inputs
        copies = tree_map(lambda given: given.repeat_interleave(d, dim=0), inputs)
        with torch.enable_grad():
            self.x, self.y = states_of(model, copies, self.blocks)
        self.batch_first = len(self.x[0]) == len(tree_leaves(copies)[0])
        if self.norm is not None:
            self.x.append(self.x[-1])
            self.y.append(self.norm(self.y[-1]))
        states = [self.x[0], *self.y]
        self.states = torch.stack([self._turned(state)[::d] for state in states], 1).detach()
        self._gradients = cache(self._gradients_of)

    def _turned(self, state: Tensor) -> Tensor:
        """Exchange samples and tokens if the blocks take tokens first."""
        return state if self.batch_first else state.transpose(0, 1)

    def paths(self, normed: bool = False) -> Tensor:
        """Return the states (B, L + 1, n, d); with `normed`, the last one is that after the final norm."""
        last = -1 if normed else self.L
        return torch.cat([self.states[:, : self.L], self.states[:, last, None]], 1)

    def paths_from(self, first: Tensor) -> Tensor:
        """Return the states where the first block takes another one (B, n, d), batch first."""
        _, y = states_of(self.model, self.inputs, self.blocks, lambda l, x: x if l else first)
        return torch.stack([first, *y], 1).detach()

    def _gradients_of(self, l: int, token: int) -> Tensor:
        """Return d y_token / d x_source of a block, (B, d, n, d)."""
        y = self._turned(self.y[l])
        copies = torch.arange(len(y))
        of_each = y[copies, token, copies % self.d].sum()
        (found,) = torch.autograd.grad(of_each, self.x[l], retain_graph=True)
        return self._turned(found).unflatten(0, (-1, self.d))

    def jacobians(self, token: int, source: int | None = None, normed: bool = False) -> Tensor:
        """Return d (y - x)_token / d x_source of every block and sample, (B, L, d, d); None: the token itself.

        Args:
            normed: whether the last block includes the final norm.
        """
        token %= self.states.shape[2]
        at, last = token if source is None else source, self.L if normed else self.L - 1
        J = torch.stack(
            [self._gradients(l, token)[:, :, at] for l in [*range(self.L - 1), last]], 1
        )
        return J - (at == token) * torch.eye(self.d, dtype=J.dtype)


def truth_of(model: nn.Module, inputs: Tensor, ds: xr.Dataset) -> Truth:
    """Return what the blocks that were measured compute, with the final norm if that was included."""
    norm = ds.attrs["final_norm_module"] if ds.attrs["final_norm"] == "include" else ""
    return Truth(model, inputs, ds.attrs["blocks"].split(", "), ds.attrs["width"], norm)


def in_one_graph(x: Tensor, y: Tensor, b: int, source: int, target: int) -> Tensor:
    """Return d (y - x)_target / d x_source of a sample, by gradients in one graph; 0 where there is no way."""
    rows = [
        torch.autograd.grad(y_i, x, retain_graph=True, materialize_grads=True)[0][b, source]
        for y_i in y[b, target]
    ]
    return torch.stack(rows) - (source == target) * torch.eye(len(rows), dtype=x.dtype)


@torch.no_grad()
def couplings(J: Tensor, K: int, bases: Tensor | None = None) -> dict[str, Tensor]:
    """Return the five mis-couplings of every layer pair, (*batch, L, L), from their definitions.

    Args:
        J: Jacobians (*batch, L, d, d).
        bases: Jacobians whose singular vectors are the bases, as many as in J; None: J.
    """
    U, _, Vh = torch.linalg.svd(J if bases is None else bases)
    A = torch.einsum("...mdk,...lde,...mje->...lmkj", U[..., :K], J, Vh[..., :K, :])
    s = torch.linalg.svdvals(J)[..., None, :K]
    S, off = torch.diag_embed(s), A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))
    of_page, of_release, of_pairs, of_all = (
        torch.linalg.matrix_norm(matrix) for matrix in (A - S, A.abs() - S, off, A)
    )
    return {
        "miscoupling": of_page / s.norm(dim=-1),
        "miscoupling_release": of_release / s.norm(dim=-1),
        "miscoupling_release_trace": of_release / s.sum(-1),
        "offdiag": of_pairs,
        "offdiag_normalized": of_pairs / of_all,
    }
