"""Coupling matrices, the definitions of mis-coupling, and their null levels.

J^l = U^l S^l V^l^T is the Jacobian of block l (of L), d x d. Expressed in the top-K basis of block l' (eq. 10):

    A^{l l'} = U^{l'}_K^T  J^l  V^{l'}_K                                    (K, K)

Mis-coupling, 0 = perfectly coupled, s_K the top K singular values of J^l:

    miscoupling                 |A - diag(s_K)|_F / |s_K|_2      the project page's m_K
    miscoupling_release         | |A| - diag(s_K) |_F / |s_K|_2  the authors' release, "norm" (p = 2); |A| by element
    miscoupling_release_trace   | |A| - diag(s_K) |_F / |s_K|_1  the authors' release, "trace" (p = 1)
    offdiag                     |A - Diag A|_F                   paper eq. 13
    offdiag_normalized          |A - Diag A|_F / |A|_F           paper eq. 14

`DEFINITIONS` declares the formulas and the texts in the Dataset, the logs and the page. The matrix for k < K is the leading k x k
part of the one for K, so one product serves every k. Cost L^2 K d (d + K).

Each has a *null level*: what an unrelated block would give. `spread` says how far chance alone moves it. Two blocks are
*unrelated* if one is turned against the other: J' -> Q J' Q^T with one random rotation Q (Haar measure), so that U' and V' turn
together. What each block has by itself stays: its singular values, its trace, and the angles between its own left and right
singular vectors. With J of block l and the basis of block l',

    tau = tr J / d,   J - tau I = S0 + A0 (symmetric + antisymmetric),   G = U'_K^T V'_K     (K, K)

the entries of A = (Q U')^T J (Q V') have exactly the mean and the variance

    E A_ij     = tau G_ij
    sigma_ij^2 = |S0|^2 (1 + (1 - 2/d) G_ij^2) / ((d - 1)(d + 2)) + |A0|^2 (1 - G_ij^2) / (d (d - 1))

The null level of a mis-coupling is its mean over Q. `rotations` measures it, and the measurement stores it. The root of the
expected square has a formula, which serves control variates of that mean:

    miscoupling                 sqrt(1 + (tau^2 |G|^2 + sum_ij sigma_ij^2 - 2 tau sum_k s_k G_kk) / |s|_2^2)
    miscoupling_release         sqrt(1 + (tau^2 |G|^2 + sum_ij sigma_ij^2 - 2 sum_k s_k E|A_kk|) / |s|_2^2)

The first is exact; in the second E|A_kk| is that of a normal variable. They need few numbers of each block, which are stored: the
`Moments` of its Jacobian and the `Overlap` of its singular vectors. Derivation: docs/measurements.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import pi, sqrt
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import vector_norm

from tracker.linalg.precision import frobenius, power_of_two
from tracker.linalg.svd import above_rounding
from tracker.measures.declaration import NORMED, WITH_NORM, Measure

CouplingMatrices = Float[Tensor, "*#pairs K K"]
SingularValues = Float[Tensor, "*#pairs K"]  # of the Jacobian, broadcast over bases
Values = Float[Tensor, "*#pairs"]


def page(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return m_K of the project page."""
    return _ratio(frobenius(A - torch.diag_embed(s)), vector_norm(s, dim=-1))


def release(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return the release's measure with p = 2."""
    return _ratio(frobenius(A.abs() - torch.diag_embed(s)), vector_norm(s, dim=-1))


def release_trace(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return the release's measure with p = 1."""
    return _ratio(frobenius(A.abs() - torch.diag_embed(s)), s.sum(-1))


def offdiag(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return the norm of the off-diagonal entries."""
    return frobenius(A - torch.diag_embed(torch.linalg.diagonal(A)))


def offdiag_normalized(A: CouplingMatrices, s: SingularValues) -> Values:
    """Return the norm of the off-diagonal entries, relative to |A|_F."""
    return _ratio(offdiag(A, s), frobenius(A))


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
        main: those of its variants that are main measures: "", "normed", "vju", "tokens" (see `declaration.Measure`). If ""
            is, its "normed" variant is logged.
    """

    name: str
    label: str
    formula: Callable[[Tensor, Tensor], Tensor]
    text: str
    equation: str
    reference: str
    main: tuple[str, ...] = ()


DEFINITIONS = (
    Definition(
        "miscoupling",
        "mis-coupling m_K",
        page,
        "Mis-coupling m_K = ‖A − S‖ / ‖s‖₂ (the project page's definition).",
        "‖A − S‖ / ‖s‖₂",
        "the paper's project page, m_K",
        main=("", "vju"),
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
        "mis-coupling, eq. 13",
        offdiag,
        "‖A − Diag A‖ (paper, eq. 13), in units of the singular values.",
        "‖A − Diag A‖",
        "paper, eq. 13",
    ),
    Definition(
        "offdiag_normalized",
        "mis-coupling, eq. 14",
        offdiag_normalized,
        "‖A − Diag A‖ / ‖A‖ (paper, eq. 14), the paper's “normalized”.",
        "‖A − Diag A‖ / ‖A‖",
        "paper, eq. 14",
        main=("", "normed", "tokens"),
    ),
)


def side_by_side(V: Float[Tensor, "*B M d K"]) -> Float[Tensor, "*B d M*K"]:
    """Return the columns of all bases in one matrix, so that one product applies a Jacobian to all of them."""
    return V.transpose(-3, -2).flatten(-2)


def in_bases(
    U: Float[Tensor, "*B M d K"], JV: Float[Tensor, "*B d M*K"]
) -> Float[Tensor, "*B M K K"]:
    """Return A[m] = U[m]^T (J V[m]) of one Jacobian, from its product with all bases."""
    return torch.einsum("...mdi,...dmj->...mij", U, JV.unflatten(-1, (U.shape[-3], U.shape[-1])))


def miscouplings(
    A: Float[Tensor, "*B L M K K"],
    s: Float[Tensor, "*B L K"],
    d: int,
    s_basis: Float[Tensor, "*B M K"],
) -> dict[str, Float[Tensor, "*B L M"]]:
    """Return the mis-coupling of every pair of Jacobian and basis, by definition.

    A value is NaN where the Jacobian is zero, or where the basis is undetermined: a Jacobian of rank below K leaves some
    of its top K singular vectors undetermined.

    Args:
        A: coupling matrices.
        s: top K singular values of the L Jacobians.
        d: width of the model.
        s_basis: top K singular values of the Jacobians that the M bases come from.
    """
    determined = above_rounding(s_basis, d)[..., -1]
    defined = (s[..., 0] > 0)[..., None] & determined[..., None, :]
    unit = power_of_two(s[..., :1])
    A, s = A / unit[..., None, None], (s / unit)[..., None, :]
    values = {one.name: one.formula(A, s) for one in DEFINITIONS}
    # The one definition that is not relative to s
    values["offdiag"] = values["offdiag"] * unit
    return {name: torch.where(defined, value, torch.nan) for name, value in values.items()}


def depth_means(
    m: Float[Tensor, "*batch L L"], distance: Int[Tensor, "L L"]
) -> Float[Tensor, "*batch 3"]:
    """Return the means over all, off-diagonal and adjacent layer pairs. They leave out NaN entries (undefined pairs).

    Args:
        distance: |l - l'| of the pairs that count in the last two, 0 of others.
    """
    counted = distance >= 0, distance > 0, distance == 1
    means = [torch.where(pairs, m, torch.nan).nanmean((-2, -1)) for pairs in counted]
    return torch.stack(means, -1)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator > 0, numerator / denominator, torch.nan)


PAIR = ("token", "k", "layer", "layer_other")
# Whose null level is that of the release, times |s|_2 / |s|_1
OF_TRACE = "miscoupling_release_trace"
BY_ROTATIONS = tuple(
    definition.name for definition in DEFINITIONS if definition.name != OF_TRACE
)  # levels are measured
LEVEL = "_level"  # follows the name of the definition in the variable that holds them
OF_PAIRS, SWAPPED = "A = U′ᵀ J V′", "A = V′ᵀ J U′"


def _declared() -> tuple[Measure, ...]:
    """Return the variables for layer pairs: each definition's measure and its variants."""
    measures = []
    for definition in DEFINITIONS:
        name, main = definition.name, definition.main
        plain = Measure(
            name,
            PAIR,
            definition.label,
            option="coupling",
            curve="pairs",
            null=True,
            counted=True,
            metric=f"miscoupling/{name}",
            logged=("", "_q25", "_q75", "_null", "_coupling"),
            main="" in main,
            text=definition.text,
            formula=f"{definition.equation}, {OF_PAIRS}",
            reference=definition.reference,
        )
        variant = replace(plain, base=name)
        normed = replace(
            variant,
            name=f"{name}{NORMED}",
            variant="normed",
            label=f"{definition.label}, {WITH_NORM}",
            metric=f"miscoupling/{name}{NORMED}",
            logged=("", "_null") if "" in main else (),
            main="normed" in main,
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
            metric=f"miscoupling/{name}_vju",
            logged=("", "_null"),
            main="vju" in main,
            text=f"{definition.text} Here A = V′ᵀ J U′, the sides of the basis swapped.",
            formula=f"{definition.equation}, {SWAPPED}",
        )
        measures += [plain, normed, swapped]
        if name in BY_ROTATIONS:
            measures += [declared_level(one) for one in (plain, normed, swapped)]
    return tuple(measures)


def level_name(name: str, base: str) -> str:
    """Return the name of the variable that holds the null level of a mis-coupling, or of the release's other norm.

    Args:
        name: of a variant of the definition `base`.
    """
    start, end = name.split(base)
    return f"{start}{'miscoupling_release' if base == OF_TRACE else base}{LEVEL}{end}"


def declared_level(of: Measure) -> Measure:
    """Return the variable that holds the null level of a mis-coupling."""
    return Measure(
        level_name(of.name, of.base or of.name),
        of.dims,
        f"{of.label}: null level",
        option=of.option,
        variant=of.variant,
        formula=f"mean over random rotations Q of block l′, U′ → Q U′, V′ → Q V′, of {of.formula}",
    )


DECLARED = _declared()
MISCOUPLINGS = tuple(definition.name for definition in DEFINITIONS)
# Over layer pairs
VARIANTS = tuple(f"{name}{end}" for name in MISCOUPLINGS for end in ("", NORMED, "_vju"))


Jacobian = Float[Tensor, "*batch d d"]
ValuesOfLayers = Float[Tensor, "*batch L K"]  # of the Jacobians
Pairs = Float[Tensor, "*batch L M"]  # of L Jacobians and M bases

# Entries of Jacobians that `moments` takes at once: on a CPU, so that they stay in its cache; on an accelerator, so that copies
# of large ones take little memory.
TILE = {True: 1 << 17, False: 1 << 24}
LEAST_ROWS = 16  # of a tile, however many Jacobians there are


@dataclass(frozen=True)
class Moments:
    """What the null levels need of a Jacobian.

    Attributes:
        isotropic: tau = tr J / d.
        symmetric: |S0|_F.
        antisymmetric: |A0|_F.
    """

    isotropic: Float[Tensor, "*batch"]
    symmetric: Float[Tensor, "*batch"]
    antisymmetric: Float[Tensor, "*batch"]

    def frobenius(self, d: int) -> Float[Tensor, "*batch"]:
        """Return |J|_F."""
        # The three parts are orthogonal. Squares of tiny norms would underflow.
        return torch.hypot(
            torch.hypot(self.symmetric, self.antisymmetric), sqrt(d) * self.isotropic
        )


@dataclass(frozen=True)
class Overlap:
    """What the null levels need of a basis, by G = U_K^T V_K.

    Attributes:
        diagonal: G_kk = u_k . v_k.
        squares: the sum of G_ij^2 over i != j.
    """

    diagonal: Float[Tensor, "*batch K"]
    squares: Float[Tensor, "*batch"]


def moments(J: Jacobian, scale: Float[Tensor, "*batch"]) -> Moments:
    """Return the moments of Jacobians.

    Args:
        scale: a number of the size of J, such as s_1: the squares of tiny entries underflow. 0 for a zero matrix.
    """
    scale = torch.where(scale > 0, scale, 1.0)
    unit, d = scale[..., None, None], J.shape[-1]
    isotropic = torch.linalg.diagonal(J).mean(-1) / scale
    height = max(LEAST_ROWS, TILE[J.is_cpu] * d // max(1, J.numel()))
    of_rows = []
    for i in range(0, d, height):
        # Rows from the diagonal on, and the columns that mirror them: each pair of entries is read once.
        across, down = J[..., i : i + height, i:], J[..., i:, i : i + height].mT
        parts = torch.stack([across + down, across - down]).div_(unit)
        torch.linalg.diagonal(parts[0]).sub_(2 * isotropic[..., None])
        if i + height < d:
            # Beyond the square on the diagonal, each entry stands for itself and its mirror image.
            parts[..., height:] *= sqrt(2)
        of_rows.append(vector_norm(parts, dim=-1))
    symmetric, antisymmetric = vector_norm(torch.cat(of_rows, -1), dim=-1) / 2 * scale
    return Moments(isotropic * scale, symmetric, antisymmetric)


def overlap(G: Float[Tensor, "*batch K K"]) -> Overlap:
    """Return the overlap of singular vectors, of which G has the products u_i . v_j."""
    diagonal = torch.linalg.diagonal(G)
    return Overlap(diagonal, ((G - torch.diag_embed(diagonal)) ** 2).sum((-2, -1)))


def root_mean_squares(s: ValuesOfLayers, entries: "Entries") -> list[Pairs]:
    """Return the roots of the expected squares of `miscoupling` and `miscoupling_release` for every pair of Jacobian and basis.

    NaN for a Jacobian of zeros.

    Args:
        s: top K singular values of the Jacobians.
        entries: of A, by the moments of the Jacobians and the overlap of the vectors of the bases.
    """
    # Of a Jacobian of zeros nothing is defined.
    norm = vector_norm(torch.where(s[..., :1] > 0, s, torch.nan), dim=-1)[..., None]
    # sum_k s_k E A_kk and sum_k s_k E|A_kk|
    along = entries.tau * (s @ entries.g.mT), (entries.diagonal_size() @ s[..., None])[..., 0]
    return [(1 + (entries.square - 2 * one) / norm**2).clamp_min(0).sqrt() for one in along]


def simulated(
    J: Float[Tensor, "d d"],
    U: Float[Tensor, "d K"],
    V: Float[Tensor, "d K"],
    draws: int = 1000,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "draws K K"]:
    """Return A = (Q U)^T J (Q V) for random rotations Q, for any K: what blocks that are unrelated to J give.

    The values of a definition are `definition.formula(A, s)`. Cost: `draws` products of J with 2 K columns.

    Args:
        J: the Jacobian of block l.
        U, V: the singular vectors of block l'.
    """
    d, K = U.shape
    E, R = torch.linalg.qr(torch.cat([U, V], 1))  # U = E R_U, V = E R_V, and Q E is a random frame
    matrices = []
    for _ in range(draws):
        frame, triangle = torch.linalg.qr(
            torch.randn(d, E.shape[-1], dtype=J.dtype, generator=generator)
        )
        # Frames are uniform if the diagonal of the triangle is positive, which LAPACK does not ensure.
        frame = frame * triangle.diagonal().sign()
        matrices.append(R[:, :K].mT @ (frame.mT @ (J @ frame)) @ R[:, K:])
    return torch.stack(matrices)


class Entries:
    """The mean tau G_ij and the variance a + b G_ij^2 of the entries of A, and sums over them, for every pair."""

    def __init__(self, of: Moments, basis: Overlap, d: int) -> None:
        # A random rotation spreads the squared norm evenly over all matrices of a kind: those that are symmetric without a trace
        # have (d - 1)(d + 2) / 2 dimensions, antisymmetric ones d (d - 1) / 2. An entry u . J v, u and v orthogonal, has the
        # share of half a dimension. At d = 1 both are empty.
        symmetric = of.symmetric**2 / max(1, (d - 1) * (d + 2))
        antisymmetric = of.antisymmetric**2 / max(1, d * (d - 1))
        self.tau = of.isotropic[..., None]
        self.a = (symmetric + antisymmetric)[..., None]
        self.b = (symmetric * (1 - 2 / d) - antisymmetric)[..., None]
        self.g, K = basis.diagonal, basis.diagonal.shape[-1]
        squares = basis.squares[..., None, :]
        on_diagonal = (self.g**2).sum(-1)[..., None, :]
        # Rounding may take a sum that is zero below it.
        self.off_square = ((self.tau**2 + self.b) * squares + K * (K - 1) * self.a).clamp_min(0)
        self.square = self.off_square + (self.tau**2 + self.b) * on_diagonal + K * self.a

    def diagonal_squares(self) -> Float[Tensor, "*batch L M K"]:
        """Return E A_kk^2."""
        return self.a[..., None] + (self.tau**2 + self.b)[..., None] * self.g[..., None, :, :] ** 2

    def diagonal_size(self) -> Float[Tensor, "*batch L M K"]:
        """Return E|A_kk| of normal entries. In place, which takes half of the time."""
        g = self.g[..., None, :, :]
        mean, deviation = (
            self.tau[..., None] * g,
            (self.a[..., None] + self.b[..., None] * g**2).clamp_min_(0).sqrt_(),
        )
        ratio = (mean / deviation.clamp_min(torch.finfo(deviation.dtype).tiny)).div_(sqrt(2))
        size = mean.mul_(ratio.erf())
        return size.add_(deviation.mul_(ratio.square_().neg_().exp_()), alpha=sqrt(2 / pi))


def declared_parts(
    start: str, end: str, dims: tuple[str, ...], text: str, shared: dict[str, Any]
) -> tuple[Measure, ...]:
    """Return the variables of what null levels depend on, beside singular values: the trace, and u_k . v_k."""
    declared = {
        "isotropic": ("isotropic part of the Jacobian", "τ = tr J / d", dims),
        "alignment": ("alignment of output and input directions", "uₖ · vₖ, J = U S Vᵀ", (*dims, "rank")),
    }  # fmt: skip
    return tuple(
        Measure(f"{start}{name}{end}", of, f"{label}{text}", formula=formula, **shared)
        for name, (label, formula, of) in declared.items()
    )
