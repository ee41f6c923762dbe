"""Top-K singular triplets with a certificate.

J = U S V^T, singular values falling. A triplet is *accurate* when its residuals are small,

    residual = max_k max(|J v_k - s_k u_k|, |J^T u_k - s_k v_k|) / s_1,

and a set of K triplets is *complete* when no larger singular value was missed. With R = J - U_K S_K V_K^T and
sigma = s_K (1 + 1e-4), the matrix sigma^2 I - R^T R is positive definite, and its Cholesky factorisation succeeds,
if and only if |R|_2 < sigma. Cost of the full decomposition O(d^3); of the certificate one product and one Cholesky.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

COMPLETENESS_MARGIN = 1e-4


@dataclass(frozen=True)
class Triplets:
    """The top K singular triplets of B matrices, and how far they can be trusted."""

    U: Float[Tensor, "B d K"]
    S: Float[Tensor, "B K"]
    V: Float[Tensor, "B d K"]
    residual: Float[Tensor, " B"]  # relative to s_1; NaN for a zero matrix
    complete: Bool[Tensor, " B"]  # no larger singular value was missed


def top_singular_triplets(J: Float[Tensor, "B d d"], K: int) -> Triplets:
    """The K largest singular triplets of each matrix, by full decomposition.

    Raises:
        ValueError: if an entry of J is not finite (LAPACK would return garbage without a word).
    """
    if not torch.isfinite(J).all():
        raise ValueError("the Jacobian has entries that are not finite (overflow or NaN); nothing can be decomposed")
    U, S, Vh = torch.linalg.svd(J, full_matrices=False)
    U, S, V = U[..., :K], S[..., :K], Vh[..., :K, :].mT
    return Triplets(U, S, V, residual(J, U, S, V), is_complete(J, U, S, V))


def residual(J: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Float[Tensor, " B"]:
    """The larger of both residuals over all triplets, relative to s_1."""
    right = torch.linalg.vector_norm(J @ V - U * S[..., None, :], dim=-2)
    left = torch.linalg.vector_norm(J.mT @ U - V * S[..., None, :], dim=-2)
    return torch.maximum(left, right).amax(-1) / S[..., 0]


def is_complete(J: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Bool[Tensor, " B"]:
    """Whether no singular value above s_K (1 + 1e-4) is missing from the triplets: exact, by Cholesky.

    For a matrix whose s_K is zero to rounding, nothing larger is missing when the remainder is zero to rounding.
    """
    R = J - (U * S[..., None, :]) @ V.mT
    rounding = torch.finfo(J.dtype).eps * J.shape[-1] * S[..., 0]
    sigma = torch.maximum(S[..., -1] * (1 + COMPLETENESS_MARGIN), rounding)
    # Scaled by sigma so that the squares of tiny Jacobians do not underflow; a zero matrix misses nothing.
    R = R / torch.where(sigma > 0, sigma, 1)[..., None, None]
    identity = torch.eye(J.shape[-1], dtype=J.dtype, device=J.device)
    return torch.linalg.cholesky_ex(identity - R.mT @ R).info == 0
