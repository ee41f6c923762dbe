"""What the products of the blocks' derivatives do to a small change of the state.

    P_{l..m} = (I + J_m) ... (I + J_l)            derivative of x^m by x^{l-1} at one token, the other tokens held fixed
    from the first block:  P_{1..l}               to the last block:  P_{l..L}

With s_1 >= ... >= s_d the singular values of a product of n blocks:

    amplification       s_1                                     how much the most amplified direction grows
    effective rank      exp(-sum_k p_k ln p_k), p_k = s_k / sum_j s_j        (Roy and Vetterli, 2007)
                        d if all directions grow alike (an orthogonal map, dynamical isometry), 1 if one remains
    Lyapunov exponents  (1/n) ln s_k                            mean growth of direction k in a block; 0: kept as it is

The products are of the blocks without the final norm, whose derivative scales all directions by the inverse of |x^L|. They are
decomposed at a few depths, `depths`, as a decomposition costs as much as ten products. Values at other depths are NaN. Cost for
each block: two products and, on the way, QR steps (`linalg.products`); for each depth two decompositions without vectors.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.linalg.products import Chain
from tracker.linalg.svd import SMALL, above_rounding
from tracker.measures.declaration import LAYER, WITHOUT_NORM, Axis, Measure

WIDE_DEPTHS, DEPTHS = 4, 8  # depths that are decomposed, of models wider than SMALL and of others

SingularValues = Float[Tensor, "*B d"]


def depths(L: int, d: int) -> list[int]:
    """Return the blocks, counted from 1, at which products are decomposed: evenly spaced, the first and the last among them.

    >>> depths(6, 128), depths(30, 576)
    ([1, 2, 3, 4, 5, 6], [1, 11, 20, 30])
    """
    count = min(L, DEPTHS if d <= SMALL else WIDE_DEPTHS)
    return sorted({round(1 + i * (L - 1) / max(1, count - 1)) for i in range(count)})


def effective_rank(S: SingularValues) -> Float[Tensor, "*B"]:
    """Return the effective rank of Roy and Vetterli; NaN if all singular values are 0."""
    p = S / S.sum(-1, keepdim=True)
    return torch.exp(torch.special.entr(p).sum(-1))


def lyapunov_exponents(S: SingularValues, n: int) -> SingularValues:
    """Return the exponents of a product of n blocks; NaN for a singular value that is 0 to the rounding of the decomposition."""
    return torch.where(above_rounding(S, S.shape[-1]), S, torch.nan).log() / n


class Products:
    """The products from the first block on and to the last block, and their measures.

    Args:
        L, K: the number of blocks, and of singular values that are returned.
        dtype: of the returned values.
    """

    def __init__(self, L: int, d: int, K: int, dtype: torch.dtype) -> None:
        self.L, self.K, self.dtype = L, K, dtype
        self.at = depths(L, d)
        self._chain = Chain()
        self._from_first: dict[int, Tensor] = {}

    def add(self, l: int, J: Float[Tensor, "R d d"]) -> None:
        """Take the Jacobians of block l; blocks come in their order."""
        self._chain.multiply(_with_identity(J))
        if l in self.at:
            self._from_first[l] = self._chain.singular_values()

    def values(self, jacobian: Callable[[int], Float[Tensor, "R d d"]]) -> dict[str, Tensor]:
        """Return all measures of the products, over (row, layer, ...).

        Args:
            jacobian: l -> the Jacobians of block l again, which the products to the last block take in falling order.
        """
        # Of the transposed factors: the product to the last block grows at its right end
        self._chain = Chain()
        to_last = {1: self._from_first[self.L]}
        for l in range(self.L, 1, -1):
            self._chain.multiply(_with_identity(jacobian(l)).mT)
            if l in self.at:
                to_last[l] = self._chain.singular_values()
        whole = self._from_first[self.L]
        values = {"lyapunov_exponent": lyapunov_exponents(whole, self.L)}
        for name, by_depth in (("from_first", self._from_first), ("to_last", to_last)):
            values[f"{name}_singular_value"] = self._stacked(
                {l: S[..., : self.K] for l, S in by_depth.items()}
            )
            values[f"{name}_amplification"] = self._stacked(
                {l: S[..., 0] for l, S in by_depth.items()}
            )
            values[f"{name}_effective_rank"] = self._stacked(
                {l: effective_rank(S) for l, S in by_depth.items()}
            )
        return {name: value.to(self.dtype) for name, value in values.items()}

    def _stacked(self, by_depth: dict[int, Tensor]) -> Tensor:
        missing = torch.full_like(by_depth[1], torch.nan)
        return torch.stack([by_depth.get(l, missing) for l in range(1, self.L + 1)], 1)


def _with_identity(J: Float[Tensor, "R d d"]) -> Float[Tensor, "R d d"]:
    # Other measures read J afterwards.
    M = J.clone()
    torch.linalg.diagonal(M).add_(1)
    return M


_FORMS = {  # of products: the blocks, in symbols and in words
    "from_first": ("P = (I + Jˡ) … (I + J¹)", "from the first block to block l"),
    "to_last": ("P = (I + Jᴸ) … (I + Jˡ)", "from block l to the last block"),
}
_OF_ONE: dict[str, tuple[str, str, str, str, Axis]] = {  # label, formula, reference, text, axis
    "amplification": (
        "amplification",
        "s₁, P = U S Vᵀ",
        "Pennington et al. (2017)",
        "The largest factor by which a small change of the token's state grows",
        "logarithmic",
    ),
    "effective_rank": (
        "effective rank",
        "exp(−Σₖ pₖ ln pₖ), pₖ = sₖ / Σⱼ sⱼ, P = U S Vᵀ",
        "Roy and Vetterli (2007)",
        "How many directions of a small change of the token's state survive alike: at most the model's width",
        "from zero",
    ),
}


def _declared() -> tuple[Measure, ...]:
    measures = []
    for form, (product, words) in _FORMS.items():
        end = f"{product}, blocks {WITHOUT_NORM}"
        for name, (label, formula, reference, text, axis) in _OF_ONE.items():
            # The curve is of its last value, the product of all blocks
            whole = form == "from_first"
            measures.append(
                Measure(
                    f"{form}_{name}",
                    LAYER,
                    f"{label} {words}",
                    option="products",
                    formula=f"{formula}, {end}",
                    reference=reference,
                    text=f"{text}, {words}, the other tokens held fixed.",
                    curve="last quartiles" if whole else None,
                    metric=f"jacobian/{name}" if whole else "",
                    logged=("",) if whole else (),
                    main=whole,
                    charts=("depth",),
                    axis=axis,
                )
            )
        measures.append(
            Measure(
                f"{form}_singular_value",
                (*LAYER, "rank"),
                f"singular value of the product {words}",
                option="products",
                formula=f"sₖ, P = U S Vᵀ, {end}",
                reference="Pennington et al. (2017)",
            )
        )
    exponents = Measure(
        "lyapunov_exponent",
        ("token", "exponent"),
        "Lyapunov exponent of all blocks",
        option="products",
        formula="ln(sₖ) / L, P = (I + Jᴸ) … (I + J¹) = U S Vᵀ",
        reference="Pennington et al. (2017)",
        text="Mean logarithmic growth, in a block, of each of the d directions of a small change of the token's state.",
        counted=True,
    )
    return (*measures, exponents)


DECLARED = _declared()
