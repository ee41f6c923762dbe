"""Compare formed Jacobians with differences of the block's own values, at every requested row.

The other checks compare reverse mode with itself, so they share what it gets wrong: the backward of a custom autograd function,
or values that the code takes out of autograd's sight. For a random v in each row, J v of the formed J is compared with

    differences     (f(x + h v) - f(x - h v)) / 2h, the two ends in separate calls of as many rows as J was formed of,

whose error is of order h^2 + rounding / h. Separate calls: code that reads another row's values, or that is written for one
sample, would see the same values at both ends if they were rows of one batch. Cost: two forward passes of the rows, where J takes
d cotangents.

Units of a ReLU change their sign within a large step, and a small one divides rounding by h. So rows that do not agree are
compared again with a small step, and then in float64 (where the block's code runs in it) with a smaller one. What does not
agree then is settled by a linearization of its own, with several steps: for random u_1, ..., u_m, the root mean square of u_i .
(D v) - (J^T u_i) . v has the size of the error of D v, and is divided by the size of (J - 1) v.

- A block is refused only if differences converge: those of two steps are ten times closer to each other than to J, and further
  from J than rounding explains. At single rows that is not enough: the full sequence must say the same.
- At a kink, such as a ReLU whose argument is 0, the differences to both sides converge to two derivatives. J may be that to
  one side, or of some units to the one and of others to the other side. So a block is not refused if these two are further
  apart than J is from their mean.
- If they do not converge, as with weights so large that every step crosses a jump, forward mode must agree with reverse mode.
- What `detach` holds constant is constant by the model's definition. A disagreement that goes away where `detach` is the
  identity is accepted, and reported with its size; `derivative="values"` measures with `detach` as the identity.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import nan
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from tracker.common.errors import UsageError
from tracker.devices import raise_device_errors
from tracker.jacobians.restriction import (
    DETACH,
    FAILURES,
    RowAttention,
    WithoutDetach,
    full_sequence,
    restrict,
    running_full_sequence,
    running_rows,
)
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.linalg.jacobian import GradientsStayOn, Linearization, RowFunction, linearize
from tracker.linalg.precision import EPSILON, FAST, FLOOR, Roundings, tolerance
from tracker.linalg.transfer import standard_normal
from tracker.model.recording import BlockCall

PROBES = 4  # cotangents
# By bytes of the numbers that the block computes with: steps h, relative to the root mean square of x, and the allowed error.
# Numbers of two bytes are too coarse for differences.
STEPS = {8: (1e-4, 1e-6, 1e-8), 4: (1e-2, 1e-3, 1e-4)}
ALLOWED = {8: 1e-5, 4: FAST}
# The same for a formed J, whose rows are settled if they do not agree. In float32 rounding leaves errors of up to 1e-3.
STEP_IN_ROWS = {8: 1e-4, 4: 1e-3}
ALLOWED_IN_ROWS = {8: 1e-5, 4: 3e-3}
CLOSER = 10  # times that differences which converge are closer to each other than to J

Method = Literal["differences", "differences, detached", "forward mode", "none"]
DETACHED: Method = "differences, detached"


@dataclass(frozen=True)
class Independent:
    """What agrees with J, and the error of it."""

    method: Method
    error: float  # NaN if there is nothing to compare with
    reason: str = ""  # why it was not differences


class Disagreement(UsageError):
    """Differences converge, and not to J."""


def differ_from_values(
    f: RowFunction,
    x: Float[Tensor, "R d"],
    J: Float[Tensor, "R d d"],
    residual: bool,
    step: float,
    y: Float[Tensor, "R d"] | None = None,
    allowed: float = 0.0,
) -> Float[Tensor, " R"]:
    """Return the error of J v at each row against differences of f, on the CPU.

    Args:
        f: the block at these rows, which do not depend on each other.
        x: their input, or that of their sources.
        J: their Jacobians.
        residual: whether J is that of f less the identity.
        step: h, relative to the root mean square of x.
        y: f(x). With it one evaluation of f suffices where (f(x + h v) - y) / h agrees.
        allowed: the error with which these one-sided differences agree.
    """
    # The same for each row, whatever rows are measured together; signs, so that no coordinate moves less than others.
    v = standard_normal(x.shape[-1:], x, seed=1).sign().expand_as(x)
    h = _step(x, step)
    Jv = (J @ v[..., None]).squeeze(-1)
    size = torch.maximum(_norm(Jv), FLOOR[v.dtype] * _norm(v))

    def error(difference: Tensor) -> Float[Tensor, " R"]:
        difference = difference - residual * v
        return (_norm(difference - Jv) / torch.maximum(size, _norm(difference))).cpu()

    with torch.no_grad():
        ahead = f(x + h * v)
        one_sided = None if y is None else error((ahead - y) / h)
        if one_sided is not None and bool((one_sided <= allowed).all()):
            return one_sided
        central = error((ahead - f(x - h * v)) / (2 * h))
    return central if one_sided is None else torch.fmin(central, one_sided)


def settle(
    call: BlockCall,
    rows: Rows,
    J: Float[Tensor, "R d d"],
    allowed: float,
    row_attention: RowAttention | None,
    attached: bool = False,
) -> Independent:
    """Return what agrees with J at rows that differ from their values by more than is allowed.

    Args:
        call: the recorded call.
        rows: its rows; in the full sequence no two of one sample.
        J: their Jacobians.
        allowed: the error.
        row_attention: that of single rows; None: they are in the full sequence.
        attached: whether `detach` is the identity.

    Raises:
        UsageError: if reverse mode does not give the derivative of the block's values.
        NotSliceable: if that is so at single rows alone.
    """
    if row_attention is None:
        return _settle(
            call, rows, partial(_in_full_sequence, rows=rows, attached=attached), (J, allowed)
        )
    at_rows = lambda call: Function(restrict([(call, rows)], row_attention, attached), running_rows)  # noqa: E731
    try:
        return _settle(call, rows, at_rows, (J, allowed))
    except UsageError:
        pass
    for _, group in rows.disjoint_groups():
        settle_full_sequence(call, group, attached)
    raise NotSliceable("the derivative at single rows is not that of their values")


def settle_full_sequence(call: BlockCall, rows: Rows, attached: bool = False) -> Independent:
    """Return what agrees with reverse mode at rows of the full sequence, no two of one sample.

    Raises:
        UsageError: if reverse mode does not give the derivative of the block's values.
    """
    return _settle(call, rows, partial(_in_full_sequence, rows=rows, attached=attached))


@dataclass(frozen=True)
class Function:
    """A block at some rows, and the context in which it runs."""

    f: RowFunction
    running: Callable[[], AbstractContextManager[Roundings]]


def _in_full_sequence(call: BlockCall, rows: Rows, attached: bool) -> Function:
    return Function(full_sequence(call, rows, attached), partial(running_full_sequence, call))


Formed = tuple[Tensor, float]  # Jacobians, and the error that is allowed


def _settle(
    call: BlockCall,
    rows: Rows,
    function_of: Callable[[BlockCall], Function],
    formed: Formed | None = None,
) -> Independent:
    """Settle in float64 if the code runs in it: it may require another dtype, as nanochat does of its rotary tables."""
    residual = rows.source is None
    # Within a smaller step, few units change their sign.
    if formed is not None and call.x.dtype != torch.float64:
        with _in(call.x.dtype, call) as own, suppress(NotSliceable):
            if known := _agrees_with(
                function_of(own), rows.select_sources(own.x), residual, *formed, STEPS[4][-1]
            ):
                return known
    for dtype in dict.fromkeys((torch.float64, call.x.dtype)):
        with _in(dtype, call) as converted:
            function = function_of(converted)
            x = rows.select_sources(converted.x)
            try:
                step = STEPS[x.itemsize][1]
                if formed is not None and (
                    known := _agrees_with(function, x, residual, *formed, step)
                ):
                    return known
                with function.running() as roundings:
                    block = linearize(function.f, x, standard_normal(x.shape, x, seed=1))
            except (UsageError, NotSliceable):
                if dtype == call.x.dtype:
                    raise
                continue
            with function.running():
                outcome = _judge(call, function.f, x, block, residual, roundings)
                if (
                    formed is None
                    or (off := _error_of_products(formed[0], x, block, residual)) <= FAST
                ):
                    return outcome
        found = f"its Jacobian differs by {off:.1e} from reverse mode in {dtype}"
        if CLOSER * _amplified_rounding(call, rows, function_of) < off:
            raise Disagreement(
                f"block {call.layer} ({call.name}): {found}, more than rounding explains"
            )
        return Independent("none", nan, f"{found}: its code amplifies rounding")
    raise AssertionError("the call's own dtype is the last")


def _amplified_rounding(
    call: BlockCall, rows: Rows, function_of: Callable[[BlockCall], Function]
) -> float:
    """Return how much J^T u changes, in the measuring dtype, with a state that differs by a rounding."""
    with _in(call.x.dtype, call) as own:
        function, x = function_of(own), rows.select_sources(own.x)
        u = standard_normal((PROBES, *x.shape), x)
        nearby = x * (1 + torch.finfo(x.dtype).eps * standard_normal(x.shape, x, seed=2))
        with function.running():
            g, of_nearby = (linearize(function.f, at).pullback(u) for at in (x, nearby))
    return _largest_error(of_nearby, g, rows.source is None, u)


def _agrees_with(
    function: Function,
    x: Tensor,
    residual: bool,
    J: Float[Tensor, "R d d"],
    allowed: float,
    step: float,
) -> Independent | None:
    """Return that formed Jacobians agree with differences of a small step, in which units rarely change their sign."""
    with function.running():
        error = float(differ_from_values(function.f, x, J.to(x.dtype), residual, step).max())
    return Independent("differences", error) if error <= allowed else None


@contextmanager
def _in(dtype: torch.dtype, call: BlockCall) -> Iterator[BlockCall]:
    """Hold the weights of a call in a dtype, and yield the call in it."""
    with (
        call.replica.materialize(call.block, dtype=dtype),
        call.replica.materialize(call.final_norm, dtype=dtype),
    ):
        yield call.to(dtype, call.x.device)


def _judge(
    call: BlockCall,
    f: RowFunction,
    x: Tensor,
    block: Linearization,
    residual: bool,
    roundings: Roundings,
) -> Independent:
    """Compare reverse mode with differences of several steps and with forward mode."""
    u, v = standard_normal((PROBES, *x.shape), x), standard_normal(x.shape, x, seed=1)
    g = block.pullback(u)
    precision = min(x.itemsize, roundings.least)
    products = {"u": u, "v": v, "g": g, "residual": residual}
    error, size = partial(_error, **products), partial(_size, **products)
    values = _compare_with_values(f, x, block.y, v, error, size, precision)
    wrong = ~values.agree & values.converge
    forward = torch.full((len(x),), nan) if block.tangent is None else error(block.tangent)
    if wrong.any():
        seen, explained = _explained_by_detach(f, x, u, v, residual, values.differences)
        if not bool((explained <= ALLOWED[precision])[wrong].all()):
            raise _refusal(
                call, forward[wrong], values.error[wrong], sorted({*seen, *_custom_functions(f, x)})
            )
    unknown = ~values.agree & ~wrong
    allowed = tolerance(x.dtype, roundings.seen) if values.differences else FAST
    if block.tangent is not None and not bool((forward <= allowed)[unknown].all()):
        raise _refusal(call, forward[unknown], torch.zeros(1), sorted(_custom_functions(f, x)))
    if wrong.any():
        largest = float(values.error[wrong].max())
        reason = f"its code detaches tensors, which changes J v by {largest:.1e}"
        return Independent(DETACHED, largest, reason)
    if values.agree.all():
        return Independent("differences", float(values.error.max()))
    reason = (
        "differences do not converge"
        if values.differences
        else "it computes in 16 bits, too coarse for differences"
    )
    if block.tangent is None:
        return Independent(
            "none", nan, f"{reason}, and there is no forward mode: {block.no_tangent}"
        )
    return Independent("forward mode", float(forward[unknown].max()), reason)


@dataclass(frozen=True)
class Differences:
    """D v at each row by differences of one step, ahead and behind: (f(x + h v) - y) / h and (y - f(x - h v)) / h."""

    h: Float[Tensor, "R 1"]
    ahead: Float[Tensor, "R d"]
    behind: Float[Tensor, "R d"]

    @property
    def central(self) -> Float[Tensor, "R d"]:
        """(f(x + h v) - f(x - h v)) / 2h."""
        return (self.ahead + self.behind) / 2


@dataclass(frozen=True)
class ByValues:
    """How reverse mode compares with differences of some steps, none for numbers that are too coarse for them."""

    differences: Sequence[Differences]
    # The least of all steps; where no central difference agrees, also of those to one side
    error: Float[Tensor, " R"]
    agree: Bool[Tensor, " R"]
    converge: Bool[Tensor, " R"]  # and what they converge to is not what reverse mode gives


def _compare_with_values(
    f: RowFunction,
    x: Float[Tensor, "R d"],
    y: Float[Tensor, "R d"],
    v: Float[Tensor, "R d"],
    error: Callable[[Tensor], Tensor],
    size: Callable[[Tensor], Tensor],
    precision: int,
) -> ByValues:
    """Compare reverse mode with differences of the steps for a precision, in bytes.

    Args:
        y: f(x).
        error: the error of D v in each row.
        size: what it is relative to.
    """
    allowed = ALLOWED.get(precision, 0.0)
    differences = [_differences(f, x, y, v, _step(x, step)) for step in STEPS.get(precision, ())]
    errors = [error(one.central) for one in differences]
    least = torch.full((len(x),), torch.inf)
    for of_step in errors:
        least = torch.fmin(least, of_step)
    if not bool((least <= allowed).all()):
        for side in (side for one in differences for side in (one.ahead, one.behind)):
            least = torch.where(least <= allowed, least, torch.fmin(least, error(side)))
    kinks = [(_norm(one.ahead - one.behind) / size(one.central)).cpu() for one in differences]
    converge = _converge(differences, errors, kinks, y, v, precision)
    return ByValues(differences, least, least <= allowed, converge)


def _error_of_products(J: Tensor, x: Tensor, block: Linearization, residual: bool) -> float:
    """Return the error of formed J^T u against reverse mode."""
    u = standard_normal((PROBES, *x.shape), x)
    found = torch.einsum("prd,rde->pre", u, J.to(u.dtype)) + residual * u
    return _largest_error(found, block.pullback(u), residual, u)


def _largest_error(g: Tensor, expected: Tensor, residual: bool, u: Tensor) -> float:
    """Return the largest error of products J^T u over the rows, relative to those without the identity."""
    sizes = (
        torch.maximum(_norm(expected - residual * u), FLOOR[torch.float32] * _norm(u))
        .square()
        .sum(0)
        .sqrt()
    )
    return float((_norm(g - expected).square().sum(0).sqrt() / sizes).max())


def _converge(
    differences: Sequence[Differences],
    errors: Sequence[Tensor],
    kinks: Sequence[Tensor],
    y: Float[Tensor, "R d"],
    v: Float[Tensor, "R d"],
    precision: int,
) -> Bool[Tensor, " R"]:
    """Whether, in each row, the differences of two steps agree with each other, and neither rounding nor a kink explains it.

    Args:
        differences: for each step.
        errors: of the central ones, for each step.
        kinks: how far apart those to both sides are, for each step, relative to what errors are relative to.
    """
    found = torch.zeros(len(y), dtype=torch.bool)
    epsilon = EPSILON.get(precision, EPSILON[2])  # numbers of one byte have none of their own
    of_steps = zip(differences, errors, kinks, strict=True)
    for (larger, of_larger, _), (smaller, of_smaller, kink) in pairwise(of_steps):
        size = torch.maximum(_norm(smaller.central), FLOOR[v.dtype] * _norm(v))
        rounding = epsilon * _norm(y) / smaller.h.squeeze(-1)
        apart = torch.maximum(_norm(larger.central - smaller.central), rounding) / size
        error = torch.minimum(of_larger, of_smaller)
        found |= (CLOSER * apart.cpu() <= error) & (kink <= error)
    return found


def _explained_by_detach(
    f: RowFunction,
    x: Tensor,
    u: Tensor,
    v: Tensor,
    residual: bool,
    differences: Sequence[Differences],
) -> tuple[set[str], Float[Tensor, " R"]]:
    """Return what hides values from autograd, and the error of differences where `detach` is the identity."""
    seen = WithoutDetach()

    def attached(x: Tensor) -> Tensor:
        with seen:
            return f(x)

    errors = [torch.full((len(x),), torch.inf)]
    try:
        g = linearize(attached, x).pullback(u)
        errors += [
            _error(one, u, v, g, residual).nan_to_num(torch.inf)
            for of_step in differences
            for one in (of_step.central, of_step.ahead, of_step.behind)
            if DETACH in seen.names
        ]
    except FAILURES as error:  # `detach().numpy()`, among others
        raise_device_errors(error)
    return seen.names, torch.stack(errors).amin(0)


def _error(
    derivative: Tensor, u: Tensor, v: Tensor, g: Tensor, residual: bool
) -> Float[Tensor, " R"]:
    """Return the error of D v in each row, relative to D v without the identity, from products with u."""
    difference = (u * derivative).sum(-1, dtype=torch.float64) - (g * v).sum(
        -1, dtype=torch.float64
    )
    return (difference.square().mean(0).sqrt() / _size(derivative, u, v, g, residual)).cpu()


def _size(
    derivative: Tensor, u: Tensor, v: Tensor, g: Tensor, residual: bool
) -> Float[Tensor, " R"]:
    """Return the size of D v without the identity in each row, or of J^T u if that is larger."""
    # |J^T u| has the size of |J|_F, as |J v| has.
    size = torch.maximum(
        _norm(derivative - residual * v), _norm(g - residual * u).square().mean(0).sqrt()
    )
    return torch.maximum(size, FLOOR[v.dtype] * _norm(v))


_norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)


def _step(x: Tensor, relative: float) -> Float[Tensor, "R 1"]:
    """Return the step of each row; one of zeros has no scale and takes that of the others, or 1."""
    size = x.square().mean(-1, keepdim=True).sqrt()
    scale = torch.where(size.mean() == 0, 1.0, size.mean())
    return relative * torch.where(size == 0, scale, size).clamp_min(
        torch.finfo(x.dtype).tiny ** 0.5
    )


def _differences(
    f: RowFunction, x: Tensor, y: Tensor, v: Tensor, h: Float[Tensor, "R 1"]
) -> Differences:
    with torch.no_grad():
        return Differences(h, (f(x + h * v) - y) / h, (y - f(x - h * v)) / h)


def _refusal(
    call: BlockCall, forward: Tensor, by_values: Tensor, causes: list[str]
) -> Disagreement:
    errors = [
        f"from {name} by {float(error.max()):.1e}"
        for name, error in (("forward mode", forward), ("differences of values", by_values))
        if float(error.max()) > 1e-9
    ]
    seen = f"Its code uses {', '.join(causes)}. " if causes else ""
    return Disagreement(
        f"block {call.layer} ({call.name}): autograd does not give the derivative of what the block computes; its J v differs "
        f"{' and '.join(errors)} (relative). {seen}Change the code so that autograd differentiates all of it, or measure what "
        "autograd gives: derivative='autograd'"
    )


def _custom_functions(f: RowFunction, x: Tensor) -> Iterator[str]:
    """Yield the custom autograd functions in the graph of f."""
    with torch.enable_grad(), GradientsStayOn():
        y = f(x.detach().clone().requires_grad_().clone())
    nodes, known = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if isinstance(node, BackwardCFunction):
            yield f"the autograd function {type(node).__name__.removesuffix('Backward')}"
        nodes += [following for following, _ in node.next_functions]
