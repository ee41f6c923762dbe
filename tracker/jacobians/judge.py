"""Judge whether a derivative is that of a function's values, with one table of steps and of allowed errors.

D v is found by differences of several steps h, to both sides:

    ahead = (f(x + h v) - f(x)) / h,    behind = (f(x) - f(x - h v)) / h,    central: their mean

whose errors are of order h or h^2, and rounding / h. In each row

- the derivative agrees if one of them does, to the allowed error and what rounding explains in the largest step. At a kink, such
  as a ReLU's, J is the derivative to one side, or to each side of some units;
- it is refuted if the central differences of two steps converge, and not to it: they are ten times closer to each other than
  they are large, and than they are to it; so is rounding; and those to both sides are three times closer to each other;
- else differences can't say: each step crosses a jump, or the code amplifies rounding.

What rounding changes in a derivative is measured: `moved` moves states, cotangents and weights by roundings.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tracker.linalg.jacobian import RowFunction
from tracker.linalg.precision import EPSILON, FAST


@dataclass(frozen=True)
class Bounds:
    """Allowed errors, and the steps of differences, for numbers of some precision."""

    exact: float  # of one value or derivative that is computed twice, and of what must be 0, relative to it
    differences: float  # relative to J v
    steps: tuple[float, ...]  # relative to the root mean square of x; falling


# By bytes of the numbers that the block computes with. Those of two bytes are too coarse for differences.
BOUNDS = {
    8: Bounds(1e-12, 1e-5, (1e-4, 1e-6, 1e-8)),
    4: Bounds(1e-5, 3e-3, (1e-2, 1e-3, 1e-4)),
    2: Bounds(FAST, FAST, ()),
}
FIRST = 1  # the step that is tried alone: few units of a ReLU change their sign within it
CLOSER = 10  # times that differences which converge are closer to each other than to J
# Times the distance of those to both sides, where J is refuted. At a kink J is about half of it from their mean.
KINK = 3
ROUNDINGS = 2  # of the sums x + f and u + J^T u, beside the allowed errors

norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)


@dataclass(frozen=True)
class Verdict:
    """How a derivative compares with differences in each row."""

    error: Float[
        Tensor, " R"
    ]  # the least of central differences; where none agrees, also of those to one side
    agree: Bool[Tensor, " R"]
    refuted: Bool[Tensor, " R"]


def step(x: Float[Tensor, "R d"], relative: float) -> Float[Tensor, "R 1"]:
    """Return the step of each row; one of zeros has no scale and takes that of the others, or 1."""
    size = x.square().mean(-1, keepdim=True).sqrt()
    scale = torch.where(size.mean() == 0, 1.0, size.mean())
    return relative * torch.where(size == 0, scale, size).clamp_min(
        torch.finfo(x.dtype).tiny ** 0.5
    )


def judge(
    f: RowFunction,
    x: Float[Tensor, "R d"],
    y: Float[Tensor, "R d"],
    v: Float[Tensor, "R d"],
    error: Callable[[Tensor], Tensor],
    size: Callable[[Tensor], Tensor],
    precision: int,
    allowed: float = 0.0,
) -> Verdict:
    """Judge a derivative at each row by differences of the steps for a precision, in bytes.

    Args:
        y: f(x).
        error: the error of the derivative in each row, given D v by differences.
        size: what it is relative to.
        allowed: of errors, if it is more than that of the precision.
    """
    bounds = BOUNDS.get(precision, BOUNDS[2])
    epsilon = EPSILON.get(precision, EPSILON[2])  # numbers of one byte have none of their own
    least = torch.full((len(x),), torch.inf, dtype=torch.float64)
    agree, refuted = (torch.zeros(len(x), dtype=torch.bool) for _ in range(2))
    central, sides, errors, kinks, noise = [], [], [], [], []
    for relative in bounds.steps:
        h = step(x, relative)
        with torch.no_grad():
            ahead, behind = (f(x + h * v) - y) / h, (y - f(x - h * v)) / h
        central.append((ahead + behind) / 2)
        sides += [ahead, behind]
        rounding = ROUNDINGS * epsilon * (norm(x) + norm(y)) / h.squeeze(-1)
        noise.append((rounding / size(central[-1])).cpu())
        kinks.append((norm(ahead - behind) / size(central[-1])).cpu())
        errors.append(error(central[-1]).double())
        least = torch.fmin(least, errors[-1])
    if bounds.steps:
        accepted = max(allowed, bounds.differences) + noise[0]
        if not (least <= accepted).all():
            for side in sides:
                least = torch.where(
                    least <= accepted, least, torch.fmin(least, error(side).double())
                )
        agree = least <= accepted
    for (i, larger), (j, smaller) in pairwise(enumerate(central)):
        apart, large = norm(larger - smaller), norm(smaller)
        converge = (CLOSER * apart <= large).cpu()
        apart = torch.maximum((apart / size(smaller)).cpu(), noise[j])
        nearest = torch.minimum(errors[i], errors[j])
        refuted |= converge & (CLOSER * apart <= nearest) & (KINK * kinks[j] <= nearest)
    return Verdict(least, agree, refuted & ~agree)


def moved(t: Tensor, bytes: int, generator: torch.Generator) -> Tensor:
    """Return numbers that are each moved by some rounding of a precision, or of their own if that is coarser."""
    rounding = max(torch.finfo(t.dtype).eps, EPSILON[bytes])
    return t * (1 + rounding * torch.randn(t.shape, generator=generator).to(t))


def move_weights(parts: Iterable[nn.Module], bytes: int, generator: torch.Generator) -> None:
    """Move the weights that parts of a replica hold by roundings, until they are released."""
    for part in parts:
        parameters = part.__dict__["_parameters"]
        for name, value in parameters.items():
            if value is not None and value.is_floating_point():
                parameters[name] = moved(value.detach(), bytes, generator)
