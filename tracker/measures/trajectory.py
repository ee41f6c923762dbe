"""Measures of a token's trajectory x^0 .. x^L through the blocks.

    LSS           L / | sum_l (x^l - x^{l-1}) / |x^l - x^{l-1}| |        eq. 15-16; >= 1, = 1 on a straight line
    alpha^l       ln(|x^l| / |x^{l-1}|)                                  eq. 17
    expodistance  Var_l alpha / (Avg_l alpha)^2                          eq. 18, population variance; 0 on exp. growth
    equidistance  Std_l |x^l - x^{l-1}| / Avg_l |x^l - x^{l-1}|          Fig. 25
    update ratio  |x^l - x^{l-1}| / |x^{l-1}|, for each block l = 1..L

States come as X (depth, n, d), depth 0..L. Windowed forms (Figs 27-29) take the w states around each layer, w odd.
How much each block turns the state, with f = x^l - x^{l-1}, of each position:

    block influence     1 - cos(x^{l-1}, x^l)                            ShortGPT, Men et al. 2024
    update cosine       cos(f, x^{l-1})                                  1, the state grows; 0, it turns; -1, it shrinks

And the states in the principal plane of the last ones:

    PCA           x^l on the two principal axes of the rows of X^L                        appendix A.2.1

Undefined values are NaN: the direction of a zero step, and the expodistance where the mean growth is zero to rounding.
Cost O(L n d).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.measures.declaration import BLOCK, NORMED, POSITION, STATE, Measure

States = Float[Tensor, "depth n d"]


def steps(X: States) -> Float[Tensor, "L n d"]:
    """Return x^l - x^{l-1}."""
    return X[1:] - X[:-1]


def positive(sizes: Tensor) -> Tensor:
    """Return sizes, NaN in place of those that are zero, which have no direction and divide nothing."""
    return torch.where(sizes > 0, sizes, torch.nan)


def directions(X: States) -> Float[Tensor, "L n d"]:
    """Return the unit steps; NaN where a step is zero."""
    delta = steps(X)
    length = torch.linalg.vector_norm(delta, dim=-1, keepdim=True)
    return delta / positive(length)


def lss(X: States, width: int | None = None) -> Float[Tensor, "*L n"]:
    """Return the line-shape score of each token (eq. 15-16); NaN on a closed path (zero sum of directions).

    This measure and the others with a width: without one, over all states; with one, over the `width` states around each layer,
    NaN where that window does not fit.
    """
    return _over_depth(directions(X), width, _line_shape)


def norms(X: States) -> Float[Tensor, "depth n"]:
    """Return |x^l|."""
    return torch.linalg.vector_norm(X, dim=-1)


def alphas(X: States) -> Float[Tensor, "L n"]:
    """Return the log growth per layer (eq. 17); NaN where a norm is zero."""
    norm = positive(norms(X))
    return (norm[1:] / norm[:-1]).log()


def alpha_mean(X: States) -> Float[Tensor, " n"]:
    """Return the mean of alpha over depth."""
    return alphas(X).mean(0)


def expodistance(X: States, width: int | None = None) -> Float[Tensor, "*L n"]:
    """Return the squared coefficient of variation of alpha over depth (eq. 18); NaN where the mean is zero to rounding."""
    # Alpha depends on two norms, each accurate to a few eps
    rounding = 8 * torch.finfo(X.dtype).eps
    return _over_depth(alphas(X), width, lambda a: _squared_variation(a, rounding))


def equidistance(X: States, width: int | None = None) -> Float[Tensor, "*L n"]:
    """Return the coefficient of variation of the step length over depth (Fig. 25; windows: Fig. 26)."""
    return _over_depth(norms(steps(X)), width, lambda s: _squared_variation(s, 0.0).sqrt())


def update_ratio(X: States) -> Float[Tensor, "L n"]:
    """Return the length of each step relative to the state before it; NaN where that state is zero."""
    before = norms(X)[:-1]
    return norms(steps(X)) / positive(before)


def principal_axes(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d 2"]]:
    """Return the mean of the rows and their first two principal axes; an axis without variance is NaN.

    The sign of an axis makes its largest entry positive.
    """
    mean = x.mean(0)
    _, s, axes = torch.linalg.svd(x - mean, full_matrices=False)
    # One token, or width 1, has fewer than two axes.
    s, axes = (torch.nn.functional.pad(v, (0,) * (2 * v.dim() - 1) + (2,))[:2] for v in (s, axes))
    # The sign of an axis is arbitrary: its largest entry is made positive.
    largest = axes.take_along_dim(axes.abs().argmax(-1, keepdim=True), -1)
    # A direction within rounding of no variance is one of rounding errors.
    varies = s > x.shape[0] * torch.finfo(s.dtype).eps * torch.linalg.matrix_norm(x)
    return mean, torch.where(varies[:, None], axes * largest.sign(), torch.nan).mT


def default_width(L: int) -> int:
    """Return 11 states for L >= 20, else the largest odd number <= L/2 + 1, at least 3."""
    widest = L // 2 + 1
    return 11 if L >= 20 else max(3, widest - (widest + 1) % 2)


def _line_shape(u: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(u.sum(-1), dim=-1)
    return u.shape[-1] / positive(length)


def _squared_variation(values: Tensor, zero: float) -> Tensor:
    """Return Var / Avg^2 over the last axis, population variance; NaN where |Avg| <= zero or for a single value."""
    mean = values.mean(-1)
    if values.shape[-1] < 2:
        return torch.full_like(mean, torch.nan)
    return values.var(-1, correction=0) / torch.where(mean.abs() > zero, mean, torch.nan) ** 2


def block_influence(X: States) -> Float[Tensor, "L n"]:
    """Return 1 - cos(x^{l-1}, x^l), as |u - v|^2 / 2 of the unit vectors u and v: near 0 the cosine rounds."""
    norm = norms(X)[..., None]
    # A state of zero has no direction.
    units = X / positive(norm)
    return (steps(units) ** 2).sum(-1) / 2


def update_cosine(X: States) -> Float[Tensor, "L n"]:
    """Return cos(x^l - x^{l-1}, x^{l-1})."""
    f, x = steps(X), X[:-1]
    product = norms(f) * norms(x)
    return (f * x).sum(-1) / positive(product)


def _over_depth(
    per_step: Tensor, width: int | None, reduce: Callable[[Tensor], Tensor]
) -> Float[Tensor, "*L n"]:
    """Reduce all steps, or the width - 1 steps around each layer; `per_step` is (L, n, ...), `reduce` takes the steps last."""
    if width is None:
        return reduce(per_step.movedim(0, -1))
    L, n = per_step.shape[:2]
    half = width // 2
    out = per_step.new_full((L, n), torch.nan)
    if width - 1 <= L:
        # Window w covers states w .. w + width - 1, that is steps w .. w + width - 2 (0-based), around layer w + half.
        windows = per_step.unfold(0, width - 1, 1)  # (L - width + 2, n, ..., width - 1)
        values = reduce(windows)
        out[half - 1 : half - 1 + values.shape[0]] = values
    return out


HIDDEN_STATE = "units of the hidden state"


def _of_states(
    name: str, dims: tuple[str, ...], label: str, normed: bool = True, **more: Any
) -> tuple[Measure, ...]:
    """Return a variable of the states, with quartiles as its curve if it is a main one.

    Args:
        normed: also return the variable with the final norm applied to the last state, NAME_normed.
    """
    more.setdefault("option", "trajectory")
    if more.get("main"):
        more |= {
            "curve": "quartiles",
            "counted": True,
            "metric": f"trajectory/{name}",
            "logged": ("",),
        }
    measure = Measure(name, dims, label, **more)
    if not normed:
        return (measure,)
    with_norm = replace(
        measure,
        name=f"{name}{NORMED}",
        label=f"{label}, with the final norm",
        variant="normed",
        base=name,
        formula=f"{measure.formula}; the final norm applied to xᴸ",
        metric=f"{measure.metric}{NORMED}" if measure.metric else "",
        headline=False,
        summary=False,
        main=False,
        charts=(),
    )
    return measure, with_norm


IN_WINDOW = (
    "As over training, but over a window of states around each block; near the ends no window fits."
)
DECLARED = (
    *_of_states(
        "lss",
        POSITION,
        "line-shape score",
        compute=lss,
        formula="L / ‖Σₗ (xˡ − xˡ⁻¹) / ‖xˡ − xˡ⁻¹‖‖",
        reference="paper, eq. 15 and 16",
        text="How straight a token's path through the blocks is: 1 is a straight line, higher is more winding.",
        headline=True,
        summary=True,
        main=True,
        charts=("training",),
    ),
    *_of_states(
        "expodistance",
        POSITION,
        "expodistance",
        compute=expodistance,
        formula="Varₗ αˡ / (Avgₗ αˡ)², αˡ = ln(‖xˡ‖ / ‖xˡ⁻¹‖)",
        reference="paper, eq. 17 and 18",
        text="How unevenly the norm of a token's state grows from block to block: 0 is exponential growth. It diverges "
        "where the mean growth rate nears zero.",
        headline=True,
        summary=True,
        main=True,
        charts=("training",),
        axis="logarithmic",
    ),
    *_of_states(
        "alpha_mean",
        POSITION,
        "mean growth rate α",
        compute=alpha_mean,
        formula="Avgₗ αˡ, αˡ = ln(‖xˡ‖ / ‖xˡ⁻¹‖)",
        reference="paper, eq. 17",
        text="How much the norm of a token's state grows in a block: the mean over blocks of ln(‖xˡ‖ / ‖xˡ⁻¹‖).",
        headline=True,
        summary=True,
        main=True,
        charts=("training",),
    ),
    *_of_states(
        "equidistance",
        POSITION,
        "variation of step lengths",
        compute=equidistance,
        formula="Stdₗ ‖xˡ − xˡ⁻¹‖ / Avgₗ ‖xˡ − xˡ⁻¹‖",
        reference="paper, Fig. 25",
        text="How unequal the steps of a token's state from block to block are: standard deviation over mean of their lengths; "
        "0 is equal steps.",
        main=True,
        charts=("training",),
        axis="from zero",
    ),
    *_of_states(
        "lss_window",
        BLOCK,
        "line-shape score in a window",
        compute=lss,
        formula="line-shape score over the states around block l",
        reference="paper, Figs 26 to 28",
        windowed=True,
        text=IN_WINDOW,
        charts=("depth", "blocks"),
    ),
    *_of_states(
        "expodistance_window",
        BLOCK,
        "expodistance in a window",
        compute=expodistance,
        formula="expodistance over the states around block l",
        reference="paper, Fig. 29 and 30",
        windowed=True,
        text=IN_WINDOW,
        charts=("depth", "blocks"),
        axis="logarithmic",
    ),
    *_of_states(
        "equidistance_window",
        BLOCK,
        "variation of step lengths in a window",
        compute=equidistance,
        formula="equidistance over the states around block l",
        reference="paper, Fig. 26",
        windowed=True,
        text=f"{IN_WINDOW} 0 is equal steps.",
        charts=("depth",),
    ),
    *_of_states(
        "norm",
        STATE,
        "norm of the states",
        unit=HIDDEN_STATE,
        compute=norms,
        formula="‖xˡ‖",
        reference="paper, Figs 26 and 30",
        text="‖xˡ‖, the length of a token's state after l blocks.",
        charts=("depth",),
        axis="logarithmic",
    ),
    *_of_states(
        "update_ratio",
        BLOCK,
        "update ratio",
        normed=False,
        compute=update_ratio,
        formula="‖xˡ − xˡ⁻¹‖ / ‖xˡ⁻¹‖",
        text="‖xˡ − xˡ⁻¹‖ / ‖xˡ⁻¹‖: how far a block moves its state.",
        headline=True,
        main=True,
        charts=("depth",),
        axis="logarithmic",
    ),
)
DECLARED_USE = (
    *_of_states(
        "block_influence",
        BLOCK,
        "block influence",
        normed=False,
        compute=block_influence,
        formula="1 − cos(xˡ⁻¹, xˡ)",
        reference="Men et al. (2024)",
        text="How much a block turns the state: 0 if it keeps its direction. ShortGPT removes the blocks with the least.",
        axis="logarithmic",
        option="depth_use",
        main=True,
        charts=("depth", "table"),
    ),
    *_of_states(
        "update_cosine",
        BLOCK,
        "cosine of the update to the state",
        normed=False,
        compute=update_cosine,
        formula="cos(f, xˡ⁻¹), f = xˡ − xˡ⁻¹",
        text="1 if a block's update lengthens the state, 0 if it is at a right angle to it, −1 if it shortens the state.",
        option="depth_use",
        main=True,
        charts=("depth", "table"),
    ),
)
