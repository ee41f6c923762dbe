"""The published algorithm, implemented from its description, as the baseline.

For each block, compute the Jacobian of one token's output with respect to the same token's input with d vector-Jacobian products
over the whole sequence, vectorised in chunks: a cotangent has (n, d) entries, and one of the n rows of each gradient is used.
Then compute a full SVD of each Jacobian and, for each pair of blocks separately, the K x K matrix U_K^T J V_K.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.machine import Clock


def couplings(
    model: nn.Module, blocks: list[nn.Module], inputs: Tensor, token: int, K: int, chunk: int, clock: Clock
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return Jacobians (L, d, d), top K singular values (L, K), and mis-couplings (L, L) by name, for one prompt."""
    with torch.no_grad(), clock("forward"):
        calls = _captured(model, inputs, blocks)
    J, U, S, V = [], [], [], []
    for block, (X, arguments, keywords) in zip(blocks, calls, strict=True):
        with clock("jacobian"), sdpa_kernel(SDPBackend.MATH):  # fused kernels do not support batched cotangents
            J.append(_jacobian(block, X, arguments, keywords, token, chunk))
        with clock("svd"):
            U_l, S_l, Vh_l = torch.linalg.svd(J[-1])
            U.append(U_l[:, :K])
            S.append(S_l[:K])
            V.append(Vh_l[:K].T)
    L = len(blocks)
    measures = {name: torch.empty(L, L) for name in ("miscoupling", "offdiag_normalized")}
    with clock("pairs"):
        for l in range(L):
            for m in range(L):
                A = U[m].T @ J[l] @ V[m]
                measures["miscoupling"][l, m] = (A - torch.diag(S[l])).norm() / S[l].norm()
                measures["offdiag_normalized"][l, m] = (A - torch.diag(A.diagonal())).norm() / A.norm()
    return torch.stack(J), torch.stack(S), measures


def _captured(model: nn.Module, inputs: Tensor, blocks: list[nn.Module]) -> list[tuple[Tensor, tuple, dict[str, Any]]]:
    """Record the arguments of each block's call."""
    calls = []

    def keep(block: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        calls.append((arguments[0], arguments[1:], keywords))

    handles = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    model(inputs, **({"use_cache": False} if hasattr(model, "config") else {}))
    for handle in handles:
        handle.remove()
    return calls


def _jacobian(
    block: nn.Module, X: Tensor, arguments: tuple, keywords: dict[str, Any], token: int, chunk: int
) -> Tensor:
    X = X.detach().clone().requires_grad_()
    out = block(X, *arguments, **keywords)
    y = (out[0] if isinstance(out, tuple) else out)[0, token]
    identity = torch.eye(len(y), dtype=y.dtype, device=y.device)
    rows = [
        torch.autograd.grad(y, X, cotangents, retain_graph=True, is_grads_batched=True)[0][:, 0, token]
        for cotangents in identity.split(chunk)
    ]
    return torch.cat(rows) - identity
