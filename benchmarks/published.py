"""Two baselines: the published algorithm, implemented from its description, and what a user would write by hand.

For each block, compute the Jacobian of one token's output with respect to the same token's input with d vector-Jacobian products
over the whole sequence, vectorised in chunks: a cotangent has (n, d) entries, and one of the n rows of each gradient is used.
Then compute a full SVD of each Jacobian and, for each pair of blocks separately, the K x K matrix U_K^T J V_K.

By hand, the Jacobian is `torch.func.jacrev` of the token's row alone, with the keys and values of the other rows held constant.
This takes code for each architecture: here for GPT-NeoX, whose attention and MLP are parallel.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from benchmarks import shapes
from benchmarks.machine import Clock

if TYPE_CHECKING:
    from benchmarks.coupling import Benchmark

Jacobian = Callable[[nn.Module, Tensor, tuple, dict[str, Any], int], Tensor]
CHUNK = 32  # cotangents that are multiplied together


def couplings(
    model: nn.Module, settings: "Benchmark", clock: Clock, jacobian: Jacobian
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return Jacobians (L, d, d), top K singular values (L, K), and mis-couplings (L, L) by name, for the first prompt."""
    blocks, K = shapes.blocks(model), settings.k
    inputs = shapes.inputs(settings.shape, settings.tokens, settings.prompts)[:1]
    with torch.no_grad(), clock("forward"):
        calls = _captured(model, inputs.to(settings.device), blocks)
    J, U, S, V = [], [], [], []
    for block, (X, arguments, keywords) in zip(blocks, calls, strict=True):
        # Fused kernels do not support batched cotangents
        with clock("jacobian"), sdpa_kernel(SDPBackend.MATH):
            J.append(jacobian(block, X, arguments, keywords, shapes.position(settings.shape)))
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
                measures["offdiag_normalized"][l, m] = (
                    A - torch.diag(A.diagonal())
                ).norm() / A.norm()
    return torch.stack(J), torch.stack(S), measures


def errors(
    dataset: xr.Dataset, J: Tensor, s: Tensor, by_name: dict[str, Tensor]
) -> dict[str, float]:
    """Return the largest differences of a Dataset, with its Jacobians, from what `couplings` returns."""
    first = dataset.isel(prompt=0, token=0, k=0)

    def difference(name: str, expected: Tensor) -> Tensor:
        return torch.from_numpy(first[name].values).to(expected) - expected

    norm = torch.linalg.matrix_norm
    differences = {
        "singular_value": difference("singular_value", s) / s[:, :1],
        "jacobian": norm(difference("jacobian", J)) / norm(J),
        **{name: difference(name, values) for name, values in by_name.items()},
    }
    return {name: float(values.abs().max()) for name, values in differences.items()}


def _captured(
    model: nn.Module, inputs: Tensor, blocks: list[nn.Module]
) -> list[tuple[Tensor, tuple, dict[str, Any]]]:
    """Record the arguments of each block's call."""
    calls = []

    def keep(block: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        calls.append((arguments[0], arguments[1:], keywords))

    handles = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    model(inputs, **({"use_cache": False} if hasattr(model, "config") else {}))
    for handle in handles:
        handle.remove()
    return calls


def whole_sequence(
    block: nn.Module, X: Tensor, arguments: tuple, keywords: dict[str, Any], token: int
) -> Tensor:
    """Return the Jacobian of the residual function at a token from products over the whole sequence."""
    X = X.detach().clone().requires_grad_()
    out = block(X, *arguments, **keywords)
    y = (out[0] if isinstance(out, tuple) else out)[0, token]
    identity = torch.eye(len(y), dtype=y.dtype, device=y.device)
    rows = [
        torch.autograd.grad(y, X, cotangents, retain_graph=True, is_grads_batched=True)[0][
            :, 0, token
        ]
        for cotangents in identity.split(CHUNK)
    ]
    return torch.cat(rows) - identity


def by_hand(
    block: nn.Module, X: Tensor, arguments: tuple, keywords: dict[str, Any], token: int
) -> Tensor:
    """Return the same for a layer of GPT-NeoX from one row, with the keys and values of the rows before it constant."""
    layer: Any = block
    attention, heads = layer.attention, layer.attention.config.num_attention_heads
    token %= X.shape[1]
    cosines, sines = keywords["position_embeddings"]

    def project(x: Tensor, at: slice) -> tuple[Tensor, ...]:
        """Return query, key and value (heads, rows, width), the first two rotated."""
        qkv = (
            attention.query_key_value(layer.input_layernorm(x))
            .unflatten(1, (heads, -1))
            .transpose(0, 1)
        )
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = apply_rotary_pos_emb(q[None], k[None], cosines[:, at], sines[:, at])
        return q[0], k[0], v

    with torch.no_grad():
        _, keys, values = project(X[0, :token], slice(0, token))

    def residual(x: Tensor) -> Tensor:
        row = x[None]
        q, k, v = project(row, slice(token, token + 1))
        weights = (attention.scaling * q @ torch.cat([keys, k], 1).mT).softmax(-1)
        attended = (weights @ torch.cat([values, v], 1)).transpose(0, 1).flatten(1)
        return (attention.dense(attended) + layer.mlp(layer.post_attention_layernorm(row)))[0]

    with torch.no_grad():  # with respect to weights
        return torch.func.jacrev(residual, chunk_size=CHUNK)(X[0, token])
