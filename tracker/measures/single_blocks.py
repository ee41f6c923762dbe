"""Measures of the Jacobian of one block at a token: how much the block is used, and whether J is symmetric, or at least normal.

With f = x^l - x^{l-1}, J = U S V^T and the top K singular triplets:

    Jacobian gain       |J|_F / sqrt(d)                         root mean square singular value: growth of a random small change
    linear error        |J x^{l-1} - f| / |f|                   0: f is linear in the token's own state;
                        1: J x = 0, as in a pre-norm block whose output the length of the state does not change
    symmetric share     |(J + J^T) / 2|_F^2 / |J|_F^2           1: symmetric, 0: antisymmetric
                        null level (1 + 1/d) / 2, its expectation for independent random U and V
    alignment           u_k . v_k                               1: v_k = u_k, -1: v_k = -u_k; 0 +- 1/sqrt(d) for random U and V
    departure           sqrt(|J|_F^2 - sum_k |lambda_k|^2) / |J|_F           (Henrici, 1962, relative to |J|_F)
                        0: normal, 1: nilpotent

The paper's coupling is that of singular vectors. Where residual alignment holds, J = U S U^T with v_k = u_k.

Undefined values (zero updates, zero Jacobians) are NaN. Cost: some passes over J, and one product with J; the departure needs all
eigenvalues of a matrix that is not symmetric, some 25 products of the size of J.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.linalg.cores import batch_on_cores
from tracker.linalg.precision import frobenius
from tracker.linalg.svd import SMALL, Triplets
from tracker.measures.coupling import Moments
from tracker.measures.declaration import of_each_block
from tracker.measures.trajectory import positive

Jacobian = Float[Tensor, "*B d d"]
Values = Float[Tensor, "*B"]
Vectors = Float[Tensor, "*B d"]


def jacobian_gain(of: Moments, d: int) -> Values:
    """Return |J|_F / sqrt(d)."""
    return of.frobenius(d) / d**0.5


def linear_error(Jx: Vectors, f: Vectors) -> Values:
    """Return |J x - f| / |f|."""
    length = torch.linalg.vector_norm(f, dim=-1)
    return torch.linalg.vector_norm(Jx - f, dim=-1) / positive(length)


def symmetric_share(of: Moments, d: int) -> Values:
    """Return the share of |J|_F^2 that the symmetric part has; NaN for a zero matrix."""
    symmetric = torch.hypot(of.symmetric, d**0.5 * of.isotropic)
    return (symmetric / of.frobenius(d)) ** 2


def alignment(triplets: Triplets) -> Float[Tensor, "B K"]:
    """Return u_k . v_k of the top K singular triplets; NaN where s_k is 0, and its vectors arbitrary."""
    return torch.where(triplets.determined, (triplets.U * triplets.V).sum(-2), torch.nan)


def departure(J: Jacobian) -> Values:
    """Return Henrici's departure from normality relative to |J|_F, in float64; NaN for a zero matrix."""
    zero, wide = J.abs().amax((-2, -1)) == 0, J.double()
    # Squares of tiny entries underflow.
    wide = wide / wide.abs().amax((-2, -1), keepdim=True)
    # LAPACK may end the process if it is given NaN
    unit = torch.where(zero[..., None, None], 0, wide / frobenius(wide)[..., None, None])
    if unit.shape[-1] > SMALL:
        eigenvalues = torch.linalg.eigvals(unit)
    else:
        (eigenvalues,) = batch_on_cores(lambda part: (torch.linalg.eigvals(part),), unit.cpu())
    normal = (eigenvalues.real**2 + eigenvalues.imag**2).sum(-1)
    # Of a normal matrix the sum is 1, and rounding may make it more.
    return torch.where(zero, torch.nan, (1 - normal).clamp_min(0).sqrt()).to(J)


DECLARED = (
    of_each_block(
        "jacobian_gain",
        "gain of the Jacobian",
        option="depth_use",
        compute=lambda block: jacobian_gain(block.layer.moments, block.x.shape[-1]),
        formula="‖J‖ / √d",
        text="Root mean square singular value of a block's Jacobian: how much it adds to a small random change of the state.",
        axis="logarithmic",
        charts=("depth", "table"),
    ),
    of_each_block(
        "linear_error",
        "part of the update that is not linear in the state",
        option="depth_use",
        compute=lambda block: linear_error(block.Jx, block.f),
        formula="‖J xˡ⁻¹ − f‖ / ‖f‖, f = xˡ − xˡ⁻¹",
        text="‖J x − f‖ / ‖f‖: 0 if a block's update f is linear in the token's own state x, 1 if the length of x does not "
        "matter to it (J x = 0).",
        charts=("depth", "table"),
    ),
    of_each_block(
        "symmetric_share",
        "symmetric share of the Jacobian",
        option="normality",
        compute=lambda block: symmetric_share(block.layer.moments, block.x.shape[-1]),
        formula="‖(J + Jᵀ) / 2‖² / ‖J‖²",
        text="How much of a block's Jacobian J is symmetric: 1 all of it, 0 none, 1/2 for unrelated input and output directions.",
    ),
    of_each_block(
        "mean_alignment",
        "alignment of output and input directions, mean",
        option="normality",
        compute=lambda block: alignment(block.layer.triplets).mean(-1),
        formula="mean of uₖ · vₖ over k ≤ K, for the largest K, J = U S Vᵀ",
        reference="Li and Papyan (2023); paper, section 3.2",
        text="Mean of uₖ · vₖ: 1 if a block's strongest output directions are its strongest input directions (J = U S Uᵀ), −1 if "
        "they are opposite, 0 if they are unrelated.",
    ),
    of_each_block(
        "departure",
        "departure from normality",
        option="eigenvalues",
        compute=lambda block: departure(block.J),
        formula="√(‖J‖² − Σₖ |λₖ|²) / ‖J‖, λ the eigenvalues of J",
        reference="Henrici (1962)",
        text="Henrici's departure of a block's Jacobian from normality, relative to its norm: 0 for a normal matrix, such as a "
        "symmetric one, 1 for a nilpotent one.",
    ),
)
