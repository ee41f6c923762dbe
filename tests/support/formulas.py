"""The formula of every measured variable in NumPy, from Jacobians and states by brute force, in float64.

`FORMULAS` has a function for each variable, by its name without what names a variant of it (`_normed`, `_vju`, a kind of pairs
of tokens). What it takes follows from the dimensions: a block at a token; a block and the one whose singular vectors are the
basis; the path of a token's states; the sample; and K, if it is a dimension. NaN is where a variable is undefined, and `ANY`
where nothing determines it: the singular vectors of a zero matrix.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import scipy.linalg
import torch
import xarray as xr
from scipy.special import softmax

from tests.support import brute_force
from tests.support.brute_force import Truth
from tests.support.draws import seeded
from tracker.measures import rotations
from tracker.measures.coupling import BY_ROTATIONS, MISCOUPLINGS, moments
from tracker.measures.declaration import Measure
from tracker.measures.registry import KINDS

ANY = np.inf
NOISE = (0.01, 0.03, 0.1, 0.3, 1.0)  # root mean square length, relative to that of the embedding


@dataclass(eq=False)
class Block:
    """A block's Jacobian at a token, the state x that enters it and what it adds, f."""

    J: np.ndarray
    x: np.ndarray
    f: np.ndarray
    ks: Sequence[int]

    def __post_init__(self):
        self.U, self.s, Vh = np.linalg.svd(self.J)
        self.V, self.d, self.K, self.least = Vh.T, len(self.J), max(self.ks), min(self.ks)

    def determined(self, K: int) -> bool:
        """Return whether the top K singular vectors are: those of a rank below K are arbitrary."""
        return bool(self.s[K - 1] > self.d * np.finfo(float).eps * self.s[0])

    def vectors(self, value: np.ndarray) -> np.ndarray:
        """Return what was computed of the top K singular vectors, `ANY` if they are arbitrary."""
        return value if self.determined(self.K) else np.full_like(value, ANY)


class Sample:
    """One sample of a measurement, and the same computed by brute force.

    Args:
        truth: what the model computes.
        b: its index.
        seed: of what is drawn for it.
    """

    def __init__(self, ds: xr.Dataset, truth: Truth, b: int, unembedding: Any, seed: int):
        self.ds, self.truth, self.b, self.unembedding, self.seed = ds, truth, b, unembedding, seed
        self.ks, self.L = ds.k.values.tolist(), truth.L
        self.tokens = ds.token_position.values[b].astype(int).tolist()
        self.X, self.X_normed = (truth.paths(normed)[b].numpy() for normed in (False, True))
        self.block = cache(self._block)

    def _block(self, l: int, source: int, token: int, normed: bool = False) -> Block:
        """Return block l, from 0, by its Jacobian from one token to another, or to itself."""
        if normed and l < self.L - 1:
            return self.block(l, source, token)
        J = self.truth.jacobians(token, source, normed)[self.b, l].numpy()
        x, f = self.X[l, token], self.X[l + 1, token] - self.X[l, token]
        return Block(J, x, f, self.ks)

    @cached_property
    def compared(self) -> list[int]:
        """The positions that are compared with each other."""
        return self.ds.pair_position.values[self.b].astype(int).tolist()

    @cached_property
    def bases(self) -> dict[int, int]:
        """The blocks that are compared across tokens, and those whose bases are taken, from 0."""
        pairs = zip(self.ds.layer.values, self.ds.pair_layer_other.values, strict=True)
        return {int(l) - 1: int(m) - 1 for l, m in pairs if np.isfinite(m)}

    def drawn(self, *shape: int) -> np.ndarray:
        """Return the first standard normal numbers of the sample's seed."""
        generator = seeded(self.seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).numpy()

    def linked(self, kind: str, l: int) -> list[Block]:
        """Return block l by its Jacobians of a kind of pairs of tokens."""
        first, last = self.compared[0], self.compared[-1]
        links = {
            "self": lambda t: (t, t),
            "fixed_input": lambda t: (first, t),
            "fixed_output": lambda t: (t, last),
        }
        return [self.block(l, *links[kind](t)) for t in self.compared]


def kind_of(name: str) -> str:
    """Return the kind of pairs of tokens that a variable is of; "" if it is of blocks."""
    return next(
        (kind for kind in KINDS if name.removeprefix("diagnostics_").startswith(f"{kind}_")), ""
    )


def formula_name(name: str) -> str:
    """Return the name of a variable's formula: without what names a variant of it."""
    name, kind = name.removesuffix("_normed").removesuffix("_vju"), kind_of(name)
    return name.replace(f"{kind}_", "", 1) if kind else name


def evaluate(
    sample: Sample, measure: Measure, formulas: Mapping[str, Callable[..., Any]]
) -> np.ndarray:
    """Return the values of a variable for one sample, over its declared dimensions, by one of some formulas."""
    kind, name = kind_of(measure.name), formula_name(measure.name)
    normed, formula, dims = measure.name.endswith("_normed"), formulas[name], measure.dims
    if name in OF_SAMPLES:
        return np.array(formula(sample))
    if "position" in dims:
        paths = np.moveaxis(sample.X_normed if normed else sample.X, 1, 0)
        at = {"window": sample.ds.attrs["window"]} if name.endswith("_window") else {}
        return np.stack([formula(path, **at) for path in paths], -1)
    if measure.name.endswith("_vju"):
        formula = partial(formula, swapped=True)
    ks = [(K,) for K in sample.ks] if "k" in dims else [()]
    if not kind:
        rows = [[sample.block(l, t, t, normed) for l in range(sample.L)] for t in sample.tokens]
        if name in OF_PRODUCTS:
            return np.array([formula(row) for row in rows])
        values = np.array(
            [[of_row(formula, row, row, "layer_other" in dims, K) for K in ks] for row in rows]
        )
        return values if "k" in dims else values[:, 0]
    paired, values = "pair_token_other" in dims, []
    for K in ks:
        of_blocks = []
        for l in range(sample.L):
            row, basis = sample.linked(kind, l), sample.linked(kind, sample.bases.get(l, l))
            found = np.array(of_row(formula, row, basis, paired, K))
            measured = l in sample.bases or (not paired and l in sample.bases.values())
            of_blocks.append(found if measured else np.full(found.shape, math.nan))
        values.append(of_blocks)
    return np.array(values if "k" in dims else values[0])


def of_row(
    formula: Callable[..., Any], row: list[Block], bases: list[Block], paired: bool, K: tuple
) -> list:
    return [[formula(b, basis, *K) for basis in bases] if paired else formula(b, *K) for b in row]


def norm(x: np.ndarray) -> float:
    return np.sqrt((np.abs(x) ** 2).sum())


def ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


# Of a block at a token.


def alignment(b: Block) -> np.ndarray:
    return np.diagonal(b.U.T @ b.V)[: b.K]


def departure(b: Block) -> float:
    T, _ = scipy.linalg.schur(b.J, output="complex")
    return ratio(norm(np.triu(T, 1)), norm(b.J))


def complete(b: Block) -> bool:
    """Return whether σ² I − R Rᵀ is positive definite, by its eigenvalues; a zero matrix has no larger singular value."""
    R = b.J - b.U[:, : b.K] * b.s[: b.K] @ b.V[:, : b.K].T
    sigma = 1.0001 * b.s[b.K - 1]
    return bool((sigma**2 - np.linalg.eigvalsh(R @ R.T) > 0).all()) or not b.J.any()


OF_BLOCKS = {
    "singular_value": lambda b: b.s[: b.K],
    "isotropic": lambda b: np.trace(b.J) / b.d,
    "alignment": lambda b: b.vectors(alignment(b)),
    "diagnostics_complete": complete,
    "diagnostics_full_svd": lambda b: True,
    "diagnostics_singular_gap": lambda b: -np.diff(b.s[: b.K + 1]) / b.s[0],
    "jacobian": lambda b: b.J,
    "left_singular_vector": lambda b: b.vectors(b.U[:, : b.K]),
    "right_singular_vector": lambda b: b.vectors(b.V[:, : b.K]),
    "symmetric_share": lambda b: ratio(norm((b.J + b.J.T) / 2) ** 2, norm(b.J) ** 2),
    "mean_alignment": lambda b: alignment(b).mean() if b.determined(b.K) else math.nan,
    "departure": departure,
    "jacobian_gain": lambda b: norm(b.J) / b.d**0.5,
    "linear_error": lambda b: ratio(norm(b.J @ b.x - b.f), norm(b.f)),
}


# Of the blocks at a token, from the first to one or from one to the last.


def spectra(row: list[Block], form: str) -> list[np.ndarray]:
    """Return the singular values of the products."""
    factors, found = [np.eye(b.d) + b.J for b in row], []
    for l in range(len(row)):
        P = np.eye(row[0].d)
        for factor in factors[: l + 1] if form == "from_first" else factors[l:]:
            P = factor @ P
        found.append(np.linalg.svd(P)[1])
    return found


def effective_rank(s: np.ndarray) -> float:
    p = s / s.sum()
    return math.exp(-sum(x * math.log(x) for x in p if x > 0))


def exponents(sample: Sample) -> list[np.ndarray]:
    whole = [
        spectra([sample.block(l, t, t) for l in range(sample.L)], "from_first")[-1]
        for t in sample.tokens
    ]
    # The product of a post-norm model has a rank below d: other singular values than those of the rank are 0 to rounding.
    return [
        np.log(np.where(s > len(s) * np.finfo(float).eps * s[0], s, math.nan)) / sample.L
        for s in whole
    ]


OF_PRODUCTS = {}
for form in ("from_first", "to_last"):
    OF_PRODUCTS |= {
        f"{form}_singular_value": lambda row, form=form: [
            s[: row[0].K] for s in spectra(row, form)
        ],
        f"{form}_amplification": lambda row, form=form: [s[0] for s in spectra(row, form)],
        f"{form}_effective_rank": lambda row, form=form: [
            effective_rank(s) for s in spectra(row, form)
        ],
    }


# Of a block and the one whose singular vectors are the basis.


@cache
def couplings(b: Block, basis: Block, K: int, swapped: bool = False) -> dict[str, float]:
    """Return the five mis-couplings of a pair, NaN for a zero Jacobian or a basis of a rank below K."""
    if not b.s[0] or not basis.determined(K):
        return dict.fromkeys(MISCOUPLINGS, math.nan)
    J = torch.from_numpy(np.stack([b.J, basis.J]))
    found = brute_force.couplings(J, K, J.mT if swapped else None)
    return {name: float(values[0, 1]) for name, values in found.items()}


def matrix(b: Block, basis: Block) -> np.ndarray:
    """Return A for the smallest K."""
    A = basis.U[:, : b.least].T @ b.J @ basis.V[:, : b.least]
    return basis.vectors(A) if b.J.any() else A


@cache
def levels_by_rotations(b: Block, basis: Block, K: int, swapped: bool = False) -> dict[str, float]:
    """Return the null levels of a pair alone, by the package's mean over rotations, which test_rotations.py compares."""
    if not b.s[0] or not basis.determined(K):
        return dict.fromkeys(BY_ROTATIONS, math.nan)
    sides = (basis.V, basis.U) if swapped else (basis.U, basis.V)
    # Of one row and one block
    J, s, *UV = (torch.from_numpy(part)[None, None] for part in (b.J, b.s, *sides))
    T = rotations.turned(J[0], rotations.frames(b.d))[:, None]
    of, (U, V) = moments(J, s[..., 0]), (vectors[..., :K] for vectors in UV)
    found = rotations.mean_levels(T, s[..., :K], of, U, V, (K,))
    return {name: float(level) for name, level in found.items()}


def levels(b: Block, basis: Block, K: int, swapped: bool = False) -> dict[str, float]:
    """Return the null levels of a pair."""
    drawn = levels_by_rotations(b, basis, K, swapped)
    return drawn | {
        "miscoupling_release_trace": drawn["miscoupling_release"] * norm(b.s[:K]) / b.s[:K].sum()
    }


def own_or_level(b: Block, basis: Block, K: int, swapped: bool = False, *, name: str) -> float:
    """Return the null level, 0 for a Jacobian in its own basis."""
    return levels(b, basis, K, swapped)[name] * (b is not basis or swapped)


OF_PAIRS = {"matrix": matrix}
OF_PAIRS |= {
    name: lambda *pair, name=name, **how: couplings(*pair, **how)[name] for name in MISCOUPLINGS
}
OF_PAIRS |= {
    f"{name}_level": lambda *pair, name=name, **how: levels_by_rotations(*pair, **how)[name]
    for name in BY_ROTATIONS
}
NULL_LEVELS = {name: partial(own_or_level, name=name) for name in MISCOUPLINGS}


# Of the path x⁰ … xᴸ of a token's states.


def steps(x: np.ndarray) -> list[np.ndarray]:
    return [after - before for before, after in zip(x, x[1:], strict=False)]


def lss(x: np.ndarray) -> float:
    """Return the line-shape score by the recursion of eq. 15 and 16."""
    moved = x[0]
    for step in steps(x):
        moved = moved + step / norm(step) if norm(step) > 0 else math.nan * step
    return (len(x) - 1) / norm(moved - x[0])


def alphas(x: np.ndarray) -> list[float]:
    return [np.log(norm(after) / norm(before)) for before, after in zip(x, x[1:], strict=False)]


def variation(values: Sequence[float]) -> float:
    """Return Var / Avg²."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def around(x: np.ndarray, window: int, value: Callable[[np.ndarray], float]) -> list[float]:
    """Return a measure of the states around each block, NaN where no window fits."""
    half, L = window // 2, len(x) - 1
    return [
        value(x[l - half : l + half + 1]) if half <= l <= L - half else math.nan
        for l in range(1, L + 1)
    ]


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return ratio(x @ y, norm(x) * norm(y))


OF_PATHS = {
    "lss": lss,
    "expodistance": lambda x: variation(alphas(x)),
    "equidistance": lambda x: math.sqrt(variation([norm(step) for step in steps(x)])),
}
OF_PATHS |= {f"{name}_window": partial(around, value=value) for name, value in OF_PATHS.items()}
OF_PATHS |= {
    "alpha_mean": lambda x: sum(alphas(x)) / len(alphas(x)),
    "norm": lambda x: [norm(state) for state in x],
    "update_ratio": lambda x: [
        ratio(norm(f), norm(before)) for f, before in zip(steps(x), x, strict=False)
    ],
    "update_cosine": lambda x: [cosine(f, before) for f, before in zip(steps(x), x, strict=False)],
    "block_influence": lambda x: [1 - cosine(a, b) for a, b in zip(x, x[1:], strict=False)],
}


# Of a sample.


def entropy(sample: Sample) -> np.ndarray:
    with torch.no_grad():
        X = torch.from_numpy(sample.X)
        p = softmax(
            sample.unembedding(sample.truth.norm(X) if sample.truth.norm else X).numpy(), -1
        )
    return -(p * np.log(p)).sum(-1)


def principal_plane(sample: Sample) -> np.ndarray:
    mean = sample.X[-1].mean(0)
    return (sample.X - mean) @ np.linalg.svd(sample.X[-1] - mean)[2][:2].T


def noise_similarity(sample: Sample) -> np.ndarray:
    clean = sample.truth.paths()[:, 0]
    n, d = clean.shape[1:]
    unit, found = torch.from_numpy(sample.drawn(n, d)), []
    for level in NOISE:
        states = clean.clone()
        states[sample.b] += level * unit * clean[sample.b].norm(dim=-1, keepdim=True) / d**0.5
        with_noise = sample.truth.paths_from(states)[sample.b].numpy()
        found.append(
            [
                [cosine(*pair) for pair in zip(*at, strict=True)]
                for at in zip(sample.X, with_noise, strict=True)
            ]
        )
    return np.array(found)


OF_SAMPLES = {
    "entropy": entropy,
    "pca": principal_plane,
    "noise_similarity": noise_similarity,
    "lyapunov_exponent": exponents,
    "diagnostics_sliced": lambda sample: np.ones((len(sample.tokens), sample.L), bool),
    "token_position": lambda sample: sample.tokens,
    "pair_position": lambda sample: sample.compared,
}
FORMULAS = OF_BLOCKS | OF_PRODUCTS | OF_PAIRS | OF_PATHS | OF_SAMPLES
# Signs of singular vectors and of principal axes are open, so only sizes are compared.
WITHOUT_SIGN = ("matrix", "left_singular_vector", "right_singular_vector", "pca")
