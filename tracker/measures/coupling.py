"""Coupling matrices and the definitions of mis-coupling.

J^l = U^l S^l V^l^T is the Jacobian of block l (of L), d x d. Expressed in the top-K basis of block l' (eq. 10):

    A^{l l'} = U^{l'}_K^T  J^l  V^{l'}_K                                    (K, K)

Mis-coupling, 0 = perfectly coupled, s_K the top K singular values of J^l:

    miscoupling                 |A - diag(s_K)|_F / |s_K|_2      the project page's m_K
    miscoupling_release         | |A| - diag(s_K) |_F / |s_K|_2  the authors' release, "norm" (p = 2); |A| by element
    miscoupling_release_trace   | |A| - diag(s_K) |_F / |s_K|_1  the authors' release, "trace" (p = 1)
    offdiag                     |A - Diag A|_F                   paper eq. 13
    offdiag_normalized          |A - Diag A|_F / |A|_F           paper eq. 14

Each has a *null level*, that of an unrelated block (`null_levels`). `DEFINITIONS` declares the formulas and the texts in the
Dataset, the logs and the page.
The matrix for k < K is the leading k x k part of the one for K, so one product serves every k. Cost L^2 K d (d + K).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.linalg.svd import above_rounding
from tracker.measures.declaration import COUPLING, MINOR, NORMED, WITH_NORM, Measure

CouplingMatrices = Float[Tensor, "*#pairs K K"]
SingularValues = Float[Tensor, "*#pairs K"]  # of the Jacobian, broadcast over bases
Values = Float[Tensor, "*#pairs"]


def page(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return m_K of the project page."""
    return _ratio(_frobenius(A - torch.diag_embed(s)), _norm(s))


def release(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return the release's measure with p = 2."""
    return _ratio(_frobenius(A.abs() - torch.diag_embed(s)), _norm(s))


def release_trace(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return the release's measure with p = 1."""
    return _ratio(_frobenius(A.abs() - torch.diag_embed(s)), s.sum(-1))


def offdiag(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return the norm of the off-diagonal entries."""
    return _frobenius(A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1)))


def offdiag_normalized(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return the norm of the off-diagonal entries, relative to |A|_F."""
    return _ratio(offdiag(A, s), _frobenius(A))


@dataclass(frozen=True)
class Definition:
    """A definition of mis-coupling.

    Attributes:
        name: the name of its variable.
        label: a short name for charts.
        formula: (A, s) -> its value for each pair of Jacobian and basis.
        text: the definition in one sentence, with its equation, for captions.
        equation: the definition in symbols.
        reference: where the definition is from.
        dashboard: the variants that have a panel on the W&B dashboard: "", "normed", "vju", "tokens" (see `registry`). A
            definition with a panel for "" has its "normed" variant logged.
    """

    name: str
    label: str
    formula: Callable[[Tensor, Tensor], Tensor]
    text: str
    equation: str
    reference: str
    dashboard: tuple[str, ...] = ()


DEFINITIONS = (
    Definition(
        "miscoupling",
        "mis-coupling m_K",
        page,
        "Mis-coupling m_K = ‖A − S‖ / ‖s‖₂ (the project page's definition).",
        "‖A − S‖ / ‖s‖₂",
        "the paper's project page, m_K",
        dashboard=("", "vju"),
    ),
    Definition(
        "miscoupling_release",
        "mis-coupling, release",
        release,
        "Mis-coupling as the authors' release defines it: ‖abs(A) − S‖ / ‖s‖₂.",
        "‖abs(A) − S‖ / ‖s‖₂",
        "authors' code, p = 2",
    ),
    Definition(
        "miscoupling_release_trace",
        "mis-coupling, release, trace",
        release_trace,
        "Mis-coupling as the authors' release defines it with p = 1: ‖abs(A) − S‖ / ‖s‖₁.",
        "‖abs(A) − S‖ / ‖s‖₁",
        "authors' code, p = 1",
    ),
    Definition(
        "offdiag",
        "off-diagonal norm",
        offdiag,
        "‖A − Diag A‖ (paper, eq. 13), in units of the singular values.",
        "‖A − Diag A‖",
        "paper, eq. 13",
    ),
    Definition(
        "offdiag_normalized",
        "off-diagonal, normalized",
        offdiag_normalized,
        "‖A − Diag A‖ / ‖A‖ (paper, eq. 14), the paper's “normalized”.",
        "‖A − Diag A‖ / ‖A‖",
        "paper, eq. 14",
        dashboard=("", "normed", "tokens"),
    ),
)


def side_by_side(V: Float[Tensor, "*B M d K"]) -> Float[Tensor, "*B d M*K"]:
    """Return the columns of all bases in one matrix, so that one product applies a Jacobian to all of them."""
    return V.transpose(-3, -2).flatten(-2)


def in_bases(U: Float[Tensor, "*B M d K"], JV: Float[Tensor, "*B d M*K"]) -> Float[Tensor, "*B M K K"]:
    """Return A[m] = U[m]^T (J V[m]) of one Jacobian, from its product with all bases."""
    return torch.einsum("...mdi,...dmj->...mij", U, JV.unflatten(-1, (U.shape[-3], U.shape[-1])))


def miscouplings(
    A: Float[Tensor, "*B L M K K"],
    s: Float[Tensor, "*B L K"],
    d: int,
    s_basis: Float[Tensor, "*B M K"] | None = None,
) -> dict[str, Float[Tensor, "*B L M"]]:
    """Return the mis-coupling of every pair of Jacobian and basis, by definition.

    A value is NaN where the Jacobian is zero, or where the basis is undetermined: a Jacobian of rank below K leaves some
    of its top K singular vectors undetermined.

    Args:
        A: coupling matrices.
        s: top K singular values of the L Jacobians.
        d: width of the model.
        s_basis: top K singular values of the Jacobians that the M bases come from; None: `s`.
    """
    s_basis = s if s_basis is None else s_basis
    determined = above_rounding(s_basis, d)[..., -1]
    defined = (s[..., 0] > 0)[..., None] & determined[..., None, :]
    return {
        definition.name: torch.where(defined, definition.formula(A, s[..., None, :]), torch.nan)
        for definition in DEFINITIONS
    }


def depth_means(m: Float[Tensor, "*batch L L"]) -> dict[str, Float[Tensor, "*batch"]]:
    """Return the means over all, off-diagonal and adjacent layer pairs. They leave out NaN entries (undefined pairs)."""
    l = torch.arange(m.shape[-1], device=m.device)
    distance = (l[:, None] - l).abs()
    return {
        "mean": _mean_where(m, distance >= 0),
        "mean_offdiag": _mean_where(m, distance > 0),
        "mean_adjacent": _mean_where(m, distance == 1),
    }


def _mean_where(m: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, m, torch.nan).nanmean((-2, -1))


def _norm(s: Tensor) -> Tensor:
    return torch.linalg.vector_norm(s, dim=-1)


def _frobenius(A: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(A)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator > 0, numerator / denominator, torch.nan)


PAIR = ("token", "k", "layer", "layer_other")
OF_PAIRS, SWAPPED = "A = U′ᵀ J V′", "A = V′ᵀ J U′"


def _declared() -> tuple[Measure, ...]:
    """Return the variables for layer pairs: each definition's measure and its variants."""
    measures = []
    for definition in DEFINITIONS:
        name, shown = definition.name, definition.dashboard
        plain = Measure(
            name,
            PAIR,
            definition.label,
            option="coupling",
            curve="pairs",
            null=True,
            counted=True,
            metric=f"coupling/{name}",
            logged=("", "_q25", "_q75", "_null"),
            dashboard=COUPLING if "" in shown else "",
            text=definition.text,
            formula=f"{definition.equation}, {OF_PAIRS}",
            reference=definition.reference,
        )
        variant = replace(plain, base=name, dashboard="")
        normed = replace(
            variant,
            name=f"{name}{NORMED}",
            variant="normed",
            label=f"{definition.label}, {WITH_NORM}",
            metric=f"coupling/{name}{NORMED}",
            logged=("", "_null") if "" in shown else (),
            dashboard=MINOR if "normed" in shown else "",
            text=f"{definition.text} Here the last block includes the final norm, as in the paper.",
            formula=f"{plain.formula}; the last block includes the final norm",
            reference=f"{definition.reference}; paper, eq. 7",
        )
        swapped = replace(
            variant,
            name=f"{name}_vju",
            variant="vju",
            label=f"{definition.label}, sides swapped",
            option="vju",
            metric=f"coupling/{name}_vju",
            logged=("", "_null"),
            dashboard=MINOR if "vju" in shown else "",
            text=f"{definition.text} Here A = V′ᵀ J U′, the sides of the basis swapped.",
            formula=f"{definition.equation}, {SWAPPED}",
        )
        measures += [plain, normed, swapped]
    return tuple(measures)


DECLARED = _declared()
MISCOUPLINGS = tuple(definition.name for definition in DEFINITIONS)
VARIANTS = tuple(f"{name}{end}" for name in MISCOUPLINGS for end in ("", NORMED, "_vju"))  # over layer pairs
