"""Brute-force measurements: full-sequence jacrev, full SVD, loops. They share no code with the tracker.

Hooks record the input and arguments of each block during a forward pass of the model, so its attention implementation is
used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass
class Oracle:
    """A recorded forward pass: input (batch first) and arguments of each block, and the output of the last one."""

    inputs: list[Tensor]
    calls: list[tuple[tuple, dict[str, Any]]]
    last: Tensor
    blocks: list[nn.Module]
    batch_first: bool
    norm: nn.Module | None
    functorch: bool  # False if an operation of the model does not run under torch.func

    def states(self) -> Tensor:
        return torch.stack([*self.inputs, self.norm(self.last) if self.norm else self.last])

    def output(self, l: int, X: Tensor) -> Tensor:
        """Return what block l gives for other states, with the arguments that it received; without the final norm."""
        args, kwargs = self.calls[l]
        out = self.blocks[l](X if self.batch_first else X.transpose(0, 1), *args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return out if self.batch_first else out.transpose(0, 1)

    def jacobian(self, l: int, b: int, t1: int, t2: int) -> Tensor:
        """Return d f^l(X)_{t2} / d x_{t1} of sample b, minus the identity where t1 = t2; rows are output coordinates."""
        X = self.inputs[l]

        def row(x: Tensor) -> Tensor:
            full = X.clone()
            full[b, t1] = x
            out = self.output(l, full)
            if l == len(self.blocks) - 1 and self.norm is not None:
                out = self.norm(out)
            return out[b, t2] - full[b, t2]

        with sdpa_kernel(SDPBackend.MATH):
            if self.functorch:
                return torch.func.jacrev(row)(X[b, t1])
            return torch.autograd.functional.jacobian(row, X[b, t1])

    def jacobians(self, b: int, t1: int, t2: int | None = None) -> list[Tensor]:
        """Return the Jacobian of every block, as `jacobian` does; t2 is t1 if None."""
        t2 = t1 if t2 is None else t2
        return [self.jacobian(l, b, t1, t2).detach() for l in range(len(self.blocks))]


def final_norm(model: nn.Module, ds: xr.Dataset) -> nn.Module | None:
    """Return the final norm that a measurement of a model includes."""
    return (
        model.get_submodule(ds.attrs["final_norm_module"])
        if ds.attrs["final_norm"] == "include"
        else None
    )


def run(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    blocks: list[nn.Module],
    norm: nn.Module | None,
    batch_first: bool,
    functorch=True,
) -> Oracle:
    received: list[tuple[Tensor, tuple, dict]] = []
    outputs: list[Tensor] = []
    handles = []
    for block in blocks:
        handles.append(
            block.register_forward_pre_hook(
                lambda m, a, k: received.append((a[0], a[1:], dict(k))), with_kwargs=True
            )
        )
        handles.append(
            block.register_forward_hook(
                lambda m, a, o: outputs.append(o[0] if isinstance(o, tuple) else o)
            )
        )
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        if isinstance(inputs, Mapping):
            model(**inputs)
        elif hasattr(model, "config") and hasattr(model.config, "use_cache"):
            model(inputs, use_cache=False)
        else:
            model(inputs)
    torch.backends.mha.set_fastpath_enabled(fastpath)
    for handle in handles:
        handle.remove()
    first = [x if batch_first else x.transpose(0, 1) for x, _, _ in received]
    last = outputs[-1] if batch_first else outputs[-1].transpose(0, 1)
    return Oracle(
        first, [(a, k) for _, a, k in received], last, blocks, batch_first, norm, functorch
    )


def in_one_graph(x: Tensor, y: Tensor, b: int, source: int, target: int) -> Tensor:
    """Return d (y - x)_target / d x_source of a sample, by gradients between two tensors of one graph."""
    rows = [
        torch.autograd.grad(y[b, target, i], x, retain_graph=True)[0][b, source]
        for i in range(y.shape[-1])
    ]
    return torch.stack(rows) - (source == target) * torch.eye(len(rows), dtype=x.dtype)


@torch.no_grad()
def couplings(J: list[Tensor], K: int, bases: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Return the five mis-couplings of every layer pair, computed pair by pair from their definitions.

    Args:
        bases: Jacobians whose singular vectors are the bases, as many as in J; None: J.
    """
    L = len(J)
    singular_values = [torch.linalg.svdvals(matrix) for matrix in J]
    decompositions = [torch.linalg.svd(matrix) for matrix in bases or J]
    names = (
        "miscoupling",
        "miscoupling_release",
        "miscoupling_release_trace",
        "offdiag",
        "offdiag_normalized",
    )
    result = {name: torch.zeros(L, L, dtype=J[0].dtype) for name in names}
    for l in range(L):
        s = singular_values[l][:K]
        for m in range(L):
            U, _, Vh = decompositions[m]
            A = U[:, :K].T @ J[l] @ Vh[:K].T
            off = A.clone()
            for i in range(K):
                off[i, i] = 0
            result["miscoupling"][l, m] = (A - torch.diag(s)).norm() / s.norm()
            result["miscoupling_release"][l, m] = (A.abs() - torch.diag(s)).norm() / s.norm()
            result["miscoupling_release_trace"][l, m] = (A.abs() - torch.diag(s)).norm() / s.sum()
            result["offdiag"][l, m] = off.norm()
            result["offdiag_normalized"][l, m] = off.norm() / A.norm()
    return result
