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

- A block is refused only if differences converge, and not to J (`judge`). At single rows that is not enough: the full sequence
  must say the same.
- If they do not converge, as with weights so large that every step crosses a jump, forward mode must agree with reverse mode.
- What `detach` holds constant is constant by the model's definition. A disagreement that goes away where `detach` is the
  identity is accepted, and reported with its size.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from tracker.common.errors import UsageError
from tracker.devices import raise_device_errors
from tracker.jacobians.judge import BOUNDS, CLOSER, judge, move_weights, moved, norm
from tracker.jacobians.judge import step as step_of
from tracker.jacobians.restriction import (
    FAILURES,
    RowAttention,
    evaluating_full_sequence,
    evaluating_rows,
    full_sequence,
    restrict,
)
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.linalg.jacobian import (
    GradientsStayOn,
    Linearization,
    RowFunction,
    dense_jacobian,
    linearize,
)
from tracker.linalg.precision import FAST, FLOOR, Roundings, tolerance
from tracker.linalg.transfer import SEED, standard_normal
from tracker.model.recording import BlockCall

PROBES = 4  # cotangents
# By how many roundings states are moved: sums may round by several, which take a state at a kink to its other side
MOVED_BY = (1, 1, 1, 1, 4, 8)
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
    h = step_of(x, step)
    Jv = (J @ v[..., None]).squeeze(-1)
    size = torch.maximum(norm(Jv), FLOOR[v.dtype] * norm(v))

    def error(difference: Tensor) -> Float[Tensor, " R"]:
        difference = difference - residual * v
        return (norm(difference - Jv) / torch.maximum(size, norm(difference))).cpu()

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
) -> Independent:
    """Return what agrees with J at rows that differ from their values by more than is allowed.

    Args:
        call: the recorded call.
        rows: its rows; in the full sequence no two of one sample.
        J: their Jacobians.
        allowed: the error.
        row_attention: that of single rows; None: they are in the full sequence.

    Raises:
        UsageError: if reverse mode does not give the derivative of the block's values.
        NotSliceable: if that is so at single rows alone.
    """
    if row_attention is None:
        return _settle(call, rows, None, (J, allowed))
    found = None
    with suppress(UsageError):
        found = _settle(call, rows, row_attention, (J, allowed))
        if found.method != DETACHED:
            return found
    groups = [group for _, group in rows.disjoint_groups()]
    methods = {settle_full_sequence(call, group).method for group in groups}
    # What the block's own code detaches is detached in the full sequence, too.
    if found is None or DETACHED not in methods:
        raise NotSliceable("the derivative at single rows is not that of their values")
    return found


def settle_full_sequence(call: BlockCall, rows: Rows) -> Independent:
    """Return what agrees with reverse mode at rows of the full sequence, no two of one sample.

    Raises:
        UsageError: if reverse mode does not give the derivative of the block's values.
    """
    return _settle(call, rows, None)


def amplified_rounding(call: BlockCall, rows: Rows, row_attention: RowAttention | None) -> float:
    """Return how far roundings take J^T u from its true value, relative to it; 0 if the code does not run in float64.

    Arguments as in `settle`.
    """
    try:
        with _at_rows(torch.float64, call, rows, row_attention) as (f, x, running), running():
            expected = linearize(f, x).pullback(_cotangents(x))
    except (UsageError, NotSliceable):
        return 0.0
    return _amplified_rounding(call, rows, row_attention, expected)


Formed = tuple[Tensor, float]  # Jacobians, and the error that is allowed


def _settle(
    call: BlockCall,
    rows: Rows,
    row_attention: RowAttention | None,
    formed: Formed | None = None,
) -> Independent:
    """Settle in float64 if the code runs in it: it may require another dtype, as nanochat does of its rotary tables."""
    residual = rows.source is None
    # Within a smaller step, few units change their sign.
    if formed is not None and call.x.dtype != torch.float64:
        at_rows = _at_rows(call.x.dtype, call, rows, row_attention)
        with suppress(NotSliceable), at_rows as (f, x, running):
            with running():
                J = formed[0].to(x.dtype)
                errors = differ_from_values(f, x, J, residual, BOUNDS[4].steps[-1])
            if bool((errors <= formed[1]).all()):
                return Independent("differences", float(errors.max()))
    for dtype in dict.fromkeys((torch.float64, call.x.dtype)):
        with _at_rows(dtype, call, rows, row_attention) as (f, x, running):
            try:
                with running(), Roundings() as roundings:
                    block = linearize(f, x, standard_normal(x.shape, x, seed=1))
            except (UsageError, NotSliceable):
                if dtype == call.x.dtype:
                    raise
                continue
            with running():
                outcome = judge_rows(call, f, x, block, residual, roundings)
                if formed is None:
                    return outcome
                expected = block.pullback(_cotangents(x))
                off = error_of_products(formed[0], x, expected, residual)
                if off <= formed[1]:
                    return outcome
        found = f"its Jacobian differs by {off:.1e} from reverse mode in {dtype}"
        if CLOSER * _amplified_rounding(call, rows, row_attention, expected) < off:
            raise Disagreement(
                f"block {call.layer} ({call.name}): {found}, more than rounding explains"
            )
        return Independent("none", nan, f"{found}: its code amplifies rounding")
    raise AssertionError("the call's own dtype is the last")


def _amplified_rounding(
    call: BlockCall,
    rows: Rows,
    row_attention: RowAttention | None,
    expected: Float[Tensor, "P R d"],
) -> float:
    """Return how far J^T u is from its true value, in the measuring dtype, where the state and weights are moved by roundings.

    Args:
        expected: J^T u of the cotangents of `_cotangents`, in the finest dtype.
    """
    generator = torch.Generator().manual_seed(SEED)
    changes, residual = [], rows.source is None
    with _at_rows(call.x.dtype, call, rows, row_attention) as (f, x, running), running():
        for times in MOVED_BY:
            move_weights(call.block.modules(), x.itemsize, generator)
            block = linearize(f, x.lerp(moved(x, x.itemsize, generator), times))
            # As it is formed: products with random vectors round more than those with unit vectors.
            J = dense_jacobian(block, PROBES, residual)
            changes.append(error_of_products(J, x, expected, residual) / times)
    return max(changes)


@contextmanager
def _at_rows(
    dtype: torch.dtype, call: BlockCall, rows: Rows, row_attention: RowAttention | None
) -> Iterator[tuple[RowFunction, Tensor, Callable[[], AbstractContextManager[None]]]]:
    """Hold the weights of a call in a dtype; yield the block at rows, its input there, and the context in which it runs.

    Arguments as in `settle`.
    """
    with (
        call.replica.materialize(call.block, dtype=dtype),
        call.replica.materialize(call.final_norm, dtype=dtype),
    ):
        call = call.to(dtype, call.x.device)
        f, running = full_sequence(call, rows), partial(evaluating_full_sequence, call)
        if row_attention is not None:
            f, running = restrict([(call, rows)], row_attention), evaluating_rows
        yield f, rows.select_sources(call.x), running


def judge_rows(
    call: BlockCall,
    f: RowFunction,
    x: Tensor,
    block: Linearization,
    residual: bool,
    roundings: Roundings,
) -> Independent:
    """Compare reverse mode with differences of several steps and with forward mode."""
    u, v = _cotangents(x), standard_normal(x.shape, x, seed=1)
    error, size = _compared(u, v, block.pullback(u), residual)
    precision = min(x.itemsize, roundings.least)
    values = judge(f, x, block.y, v, error, size, precision)
    wrong, forward = values.refuted, torch.full((len(x),), nan)
    if block.tangent is not None:
        forward = error(block.tangent)
    if wrong.any():
        seen, explained = _explained_by_detach(f, x, u, v, residual, precision)
        if not bool(explained[wrong].all()):
            raise _refusal(
                call, forward[wrong], values.error[wrong], sorted({*seen, *_custom_functions(f, x)})
            )
    unknown = ~values.agree & ~wrong
    allowed = tolerance(x.dtype, roundings.seen) if precision in (4, 8) else FAST
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
        if precision in (4, 8)
        else "it computes in 16 bits, too coarse for differences"
    )
    if block.tangent is None:
        return Independent(
            "none", nan, f"{reason}, and there is no forward mode: {block.no_tangent}"
        )
    return Independent("forward mode", float(forward[unknown].max()), reason)


def _cotangents(x: Float[Tensor, "R d"]) -> Float[Tensor, "P R d"]:
    return standard_normal((PROBES, *x.shape), x)


def error_of_products(
    J: Float[Tensor, "R d d"],
    x: Float[Tensor, "R d"],
    expected: Float[Tensor, "P R d"],
    residual: bool,
) -> float:
    """Return the error of formed J^T u against that of reverse mode, for the cotangents of `_cotangents`."""
    u = _cotangents(x)
    found = torch.einsum("prd,rde->pre", u, J.to(u.dtype)) + residual * u
    return largest_error(found, expected, residual, u)


def largest_error(g: Tensor, expected: Tensor, residual: bool, u: Tensor) -> float:
    """Return the largest error of products J^T u over the rows, relative to those without the identity."""
    sizes = torch.maximum(norm(expected - residual * u), FLOOR[torch.float32] * norm(u))
    errors = norm(g - expected)
    return float((errors.square().sum(0).sqrt() / sizes.square().sum(0).sqrt()).max())


class WithoutDetach(TorchFunctionMode):
    """While active, `detach` is the identity; `names` lists what hides values from autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if (name := _HIDES.get(function)) is not None:
            self.names.add(name)
        if function in (Tensor.detach, torch.detach):
            return arguments[0].view_as(arguments[0])
        return function(*arguments, **(keywords or {}))


DETACH = "detach()"
_HIDES = {
    Tensor.detach: DETACH,
    torch.detach: DETACH,
    Tensor.data.__get__: ".data",  # type: ignore[attr-defined]
    Tensor.numpy: "numpy()",
    Tensor.item: "item()",
    Tensor.tolist: "tolist()",
}


def _explained_by_detach(
    f: RowFunction, x: Tensor, u: Tensor, v: Tensor, residual: bool, precision: int
) -> tuple[set[str], Bool[Tensor, " R"]]:
    """Return what hides values from autograd, and whether differences agree where `detach` is the identity."""
    seen, agree = WithoutDetach(), torch.zeros(len(x), dtype=torch.bool)

    def attached(x: Tensor) -> Tensor:
        with seen:
            return f(x)

    try:
        block = linearize(attached, x)
        if DETACH in seen.names:
            measures = _compared(u, v, block.pullback(u), residual)
            agree = judge(f, x, block.y, v, *measures, precision).agree
    except FAILURES as failure:  # `detach().numpy()`, among others
        raise_device_errors(failure)
    return seen.names, agree


def _compared(
    u: Float[Tensor, "P R d"], v: Float[Tensor, "R d"], g: Float[Tensor, "P R d"], residual: bool
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return functions of a derivative D v: its error and its size in each row.

    Args:
        u, v: cotangents and a tangent.
        g: J^T u.
        residual: whether J has the identity.
    """

    def size(derivative: Tensor) -> Float[Tensor, " R"]:
        """Return the size of D v without the identity in each row, or of J^T u if that is larger."""
        # |J^T u| has the size of |J|_F, as |J v| has.
        of_g = norm(g - residual * u).square().mean(0).sqrt()
        size = torch.maximum(norm(derivative - residual * v), of_g)
        return torch.maximum(size, FLOOR[v.dtype] * norm(v))

    def error(derivative: Tensor) -> Float[Tensor, " R"]:
        """Return the error of D v in each row, relative to D v without the identity, from products with u."""
        summed = partial(torch.sum, dim=-1, dtype=torch.float64)
        difference = summed(u * derivative) - summed(g * v)
        return (difference.square().mean(0).sqrt() / size(derivative)).cpu()

    return error, size


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
