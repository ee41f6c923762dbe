"""How much a block is used: what it changes of the state that passes it, and whether its Jacobian accounts for that.

With f = x^l - x^{l-1} and J the block's Jacobian at a token:

    block influence     1 - cos(x^{l-1}, x^l)                   of each position (ShortGPT, Men et al. 2024)
    update cosine       cos(f, x^{l-1})                         of each position: 1, the state grows; 0, it turns; -1, it shrinks
    Jacobian gain       |J|_F / sqrt(d)                         root mean square singular value: growth of a random small change
    linear error        |J x^{l-1} - f| / |f|                   0: f is linear in the token's own state;
                        1: J x = 0, as in a pre-norm block whose output the length of the state does not change

Undefined values (zero states, zero updates) are NaN. Cost: passes over the states, and a product with J for each block.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.measures.declaration import BLOCK, JACOBIANS, OURS, Measure, of_each_block
from tracker.measures.trajectory import States, norms, steps

Vectors = Float[Tensor, "R d"]
Values = Float[Tensor, " R"]


def block_influence(X: States) -> Float[Tensor, "L n"]:
    """Return 1 - cos(x^{l-1}, x^l), as |u - v|^2 / 2 of the unit vectors u and v: near 0 the cosine rounds."""
    norm = norms(X)[..., None]
    units = X / torch.where(norm > 0, norm, torch.nan)
    return (steps(units) ** 2).sum(-1) / 2


def update_cosine(X: States) -> Float[Tensor, "L n"]:
    """Return cos(x^l - x^{l-1}, x^{l-1})."""
    f, x = steps(X), X[:-1]
    product = norms(f) * norms(x)
    return (f * x).sum(-1) / torch.where(product > 0, product, torch.nan)


def jacobian_gain(frobenius: Values, d: int) -> Values:
    """Return |J|_F / sqrt(d)."""
    return frobenius / d**0.5


def linear_error(Jx: Vectors, f: Vectors) -> Values:
    """Return |J x - f| / |f|."""
    length = torch.linalg.vector_norm(f, dim=-1)
    return torch.linalg.vector_norm(Jx - f, dim=-1) / torch.where(length > 0, length, torch.nan)


DECLARED = (
    of_each_block(
        "jacobian_gain",
        "gain of the Jacobian",
        option="depth_use",
        compute=lambda block: jacobian_gain(block.layer.moments.frobenius(block.x.shape[-1]), block.x.shape[-1]),
        formula="‖J‖ / √d",
        reference=OURS,
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
        reference=OURS,
        text="‖J x − f‖ / ‖f‖: 0 if a block's update f is linear in the token's own state x, 1 if the length of x does not "
        "matter to it (J x = 0).",
        charts=("depth", "table"),
    ),
)
_STATES: dict[str, Any] = {
    "curve": "quartiles",
    "counted": True,
    "logged": ("",),
    "dashboard": JACOBIANS,
    "charts": ("depth", "table"),
}
DECLARED_OF_STATES = (
    Measure(
        "block_influence",
        BLOCK,
        "block influence",
        option="depth_use",
        compute=block_influence,
        formula="1 − cos(xˡ⁻¹, xˡ)",
        reference="Men et al. (2024)",
        text="How much a block turns the state: 0 if it keeps its direction. ShortGPT removes the blocks with the least.",
        metric="trajectory/block_influence",
        axis="logarithmic",
        **_STATES,
    ),
    Measure(
        "update_cosine",
        BLOCK,
        "cosine of the update to the state",
        option="depth_use",
        compute=update_cosine,
        formula="cos(f, xˡ⁻¹), f = xˡ − xˡ⁻¹",
        reference=OURS,
        text="1 if a block's update lengthens the state, 0 if it is at a right angle to it, −1 if it shortens the state.",
        metric="trajectory/update_cosine",
        **_STATES,
    ),
)
