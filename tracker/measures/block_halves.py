"""The halves of a block, attention and MLP, by their Jacobians (`jacobians.halves`).

With J = U S V^T that of the block, J_A of the attention and J_M of the MLP, K the smallest measured:

    gains               |J_A|_F / sqrt(d), |J_M|_F / sqrt(d)
    shares              sum_k u_k . J_A v_k / sum_k s_k, and of J_M         of what the block does along its top K directions;
                        they add up to 1 where the halves are parallel
    miscoupling         mis-coupling m_K of J_M in the singular bases of J_A, and of J_A in those of J_M; the null
                        level is the root of the mean square over rotations (`coupling.root_mean_square`)
    alignment plots     U^T J_A V, U^T J_M V, of the top K                  (Li and Papyan, 2023)
                        diagonal where a half acts along the block's own directions

NaN for blocks that do not show their halves, and for couplings where a half has a rank below K. Cost: as much as the Jacobians
of the blocks, and two sets of singular triplets.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.jacobians.halves import Matrices
from tracker.linalg.svd import Triplets, top_singular_triplets
from tracker.measures import coupling
from tracker.measures.coupling import (
    Entries,
    Moments,
    moments,
    moments_of_layers,
    overlap,
    root_mean_square,
)
from tracker.measures.declaration import LAYER, OURS, Measure, of_each_block
from tracker.measures.single_blocks import jacobian_gain

Values = Float[Tensor, " R"]


def half_values(halves: dict[str, Matrices] | None, block: Triplets, K: int) -> dict[str, Tensor]:
    """Return the measures of the halves of a block, over (row, ...)."""
    R, d, _ = block.U.shape
    U, S, V = block.U[..., :K], block.S[..., :K], block.V[..., :K]
    if halves is None:
        missing = torch.full((R,), torch.nan, dtype=S.dtype, device=S.device)
        names = ("gain", "share", "miscoupling", "miscoupling_null")
        values = {f"{half}_{name}": missing for half in ("attention", "mlp") for name in names}
        matrix = missing[:, None, None].expand(R, K, K)
        return values | {f"{half}_matrix": matrix for half in ("attention", "mlp")}
    triplets = {half: top_singular_triplets(J, K) for half, J in halves.items()}
    values = {}
    for half, other in (("attention", "mlp"), ("mlp", "attention")):
        J, basis, s = halves[half], triplets[other], triplets[half].S
        of_half = moments(J, s[:, 0])
        A = U.mT @ (J @ V)
        in_basis = coupling.in_bases(basis.U[:, None], J @ basis.V)
        mutual = coupling.miscouplings(in_basis[:, None], s[:, None], d, basis.S[:, None])
        values |= {
            f"{half}_gain": jacobian_gain(of_half.frobenius(d), d),
            f"{half}_share": A.diagonal(dim1=-2, dim2=-1).sum(-1) / S.sum(-1),
            f"{half}_miscoupling": mutual["miscoupling"][:, 0, 0],
            f"{half}_miscoupling_null": _null_level(s, of_half, basis),
            f"{half}_matrix": A,
        }
    return values


def _null_level(s: Tensor, of_half: Moments, basis: Triplets) -> Values:
    """Return the null level of the mis-coupling of a half in one basis."""
    d = basis.U.shape[-2]
    of_basis = overlap((basis.U.mT @ basis.V)[:, None])
    entries = Entries(moments_of_layers([of_half]), of_basis, d)
    return root_mean_square(s[:, None], entries)[:, 0, 0]


# Words, symbol, the other half
_HALF = {"attention": ("attention", "J_A", "MLP"), "mlp": ("MLP", "J_M", "attention")}


def _declared() -> tuple[Measure, ...]:
    measures = []
    for half, (words, symbol, other) in _HALF.items():
        shared: dict[str, Any] = {"option": "halves", "reference": OURS}
        drawn = shared | {"counted": False}
        measures += [
            of_each_block(
                f"{half}_gain",
                f"gain of the {words}",
                formula=f"‖{symbol}‖ / √d",
                text=f"Root mean square singular value of the Jacobian of the {words} alone.",
                axis="logarithmic",
                **drawn,
            ),
            of_each_block(
                f"{half}_share",
                f"share of the {words} in the block's top directions",
                formula=f"Σₖ uₖ · {symbol} vₖ / Σₖ sₖ, J = U S Vᵀ of the block, k ≤ the smallest K",
                text=f"How much of what the block does along its strongest directions the {words} does; where both read the same "
                "state, the shares add up to 1.",
                **drawn,
            ),
            of_each_block(
                f"{half}_miscoupling",
                f"mis-coupling of the {words} in the bases of the {other}",
                formula=f"‖A − S‖ / ‖s‖₂, A = U′ᵀ {symbol} V′, U′ and V′ of the {other}, for the smallest K",
                text=f"Mis-coupling m_K of the {words} in the singular bases of the {other} of the same block; about 1 for "
                "unrelated ones.",
                **drawn,
            ),
            Measure(
                f"{half}_miscoupling_null",
                LAYER,
                f"mis-coupling of the {words} in the bases of the {other}: null level",
                formula=f"√E[‖A − S‖²] / ‖s‖₂, A = (Q U′)ᵀ {symbol} Q V′, Q a random rotation",
                **shared,
            ),
            Measure(
                f"{half}_matrix",
                (*LAYER, "row", "column"),
                f"residual alignment of the {words}",
                option="halves",
                formula=f"Uᵀ {symbol} V, J = U S Vᵀ of the block, for the smallest K",
                reference="Li and Papyan (2023)",
            ),
        ]
    return tuple(measures)


DECLARED = _declared()
