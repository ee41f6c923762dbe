"""Compare a block's Jacobian with two derivatives that do not come from reverse mode.

The other checks compare reverse mode with itself, so they share what it gets wrong: the backward of a custom autograd function,
or values that the code takes out of autograd's sight. For a random v, reverse mode is compared with

    forward mode    J v from a pass on dual numbers
    differences     (f(x + h v) - f(x - h v)) / 2h, from values alone

For random u_1, ..., u_m, the root mean square of u_i . (J v) - (J^T u_i) . v has the size of the error of J v; it is divided by
the size of (J - 1) v. Forward mode is as exact as reverse mode, but misses what both miss (`.data`, NumPy).
Differences miss nothing; their error is of order h^2 + rounding / h.

Both are computed in the pass of the derivative check (`checks`), which runs the rows at x, x + h v and x - h v together. If they
do not settle it, because an operation has no forward mode or because something disagrees, they are computed again in the full
sequence in float64, where differences are nearly exact; where the block does not run in float64, in the dtype
measured in, where differences show errors from 5 % on. What `detach` holds constant is constant by the model's definition: a
disagreement that goes away where `detach` is the identity is accepted, and reported. Any other disagreement is an error.

Cost, once for each block and way of calling it: a pass of three rows for each row of the derivative check, a tangent, and
`PROBES` cotangents.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tracker.common.errors import UsageError
from tracker.devices import raise_device_errors
from tracker.jacobians.restriction import (
    FAILURES,
    full_sequence,
    linearize_full_sequence,
    linearize_rows,
    replay_errors,
)
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.linalg.jacobian import GradientsStayOn, RowFunction, linearize
from tracker.linalg.precision import FAST, FLOOR, tolerance
from tracker.linalg.transfer import read, standard_normal
from tracker.model.recording import BlockCall

PROBES = 4  # cotangents
# By bytes of the numbers that the block computes with: steps h, relative to the root mean square of x, and the allowed error.
# Numbers of two bytes are too coarse for differences.
STEPS = {8: (1e-4, 1e-6), 4: (1e-2, 1e-3)}
ALLOWED = {8: 1e-5, 4: FAST}
# Steps at single rows: in float32 the smaller one, as few units of a ReLU change their sign in it; in float64 the larger one, as
# many blocks compute in float32 inside, whose rounding the smaller one would divide by 1e-6.
AT_ROWS = {8: 1e-4, 4: 1e-3}

Method = Literal["both", "forward mode", "differences", "differences, detached", "none"]


@dataclass(frozen=True)
class Independent:
    """The outcome of the check: which derivatives agree with reverse mode, and the error of the more exact one."""

    method: Method
    error: float  # NaN if neither could be used
    reason: str = ""  # why they were not both used at single rows


@dataclass(frozen=True)
class Comparison:
    """Errors of J v by reverse mode against forward mode and against differences; NaN where these can't be used."""

    forward: float
    differences: float
    allowed: tuple[float, float]
    no_forward_mode: str  # why there is none
    rounded: bool
    pulled_back: tuple[Float[Tensor, "R d"], Float[Tensor, "R d"]]  # u_1 and J^T u_1

    @property
    def forward_agrees(self) -> bool:
        """Whether forward mode agrees with reverse mode."""
        return self.forward <= self.allowed[0]

    @property
    def differences_agree(self) -> bool:
        """Whether differences agree with reverse mode."""
        return self.differences <= self.allowed[1]

    @property
    def reason(self) -> str:
        """What does not agree, or can't be used."""
        if self.no_forward_mode:
            return f"no forward mode: {self.no_forward_mode}"
        if not self.forward_agrees:
            return f"forward mode differs by {self.forward:.1e}"
        return (
            "differences can't be used there"
            if isnan(self.differences)
            else f"differences differ by {self.differences:.1e}"
        )


def compare_rows(restrict_to: Callable[[Rows], RowFunction], rows: Rows, x: Float[Tensor, "R d"]) -> Comparison:
    """Compare at single rows, in one pass.

    Args:
        restrict_to: returns the block as a function of some rows, which may repeat.
        rows: R rows.
        x: their input, or that of their sources.
    """
    R, v, residual = len(rows), standard_normal(x.shape, x, seed=1), rows.source is None
    h = _step(x, AT_ROWS[x.itemsize])
    together = torch.cat([x, x + h * v, x - h * v])
    tangents = torch.cat([v, torch.zeros_like(x), torch.zeros_like(x)])
    u = standard_normal((PROBES, *x.shape), x)
    try:
        block = linearize_rows(restrict_to(rows.subset(torch.arange(3 * R) % R)), together, v=tangents)
    except NotSliceable:  # a block may keep memory for so many samples and no more
        block = linearize_rows(restrict_to(rows), x, v=v)
        return _comparison(x, u, v, block.pullback(u), block.tangent, [], block, residual)
    _, ahead, behind = block.y.chunk(3)
    g = block.pullback(torch.cat([u, torch.zeros_like(u), torch.zeros_like(u)], dim=1))[:, :R]
    forward = None if block.tangent is None else block.tangent[:R]
    return _comparison(x, u, v, g, forward, [(ahead - behind) / (2 * h)], block, residual)


def settle(call: BlockCall, rows: Rows, at_rows: Comparison | None) -> Independent:
    """Return the outcome of the check; if the comparison at single rows does not settle it, compare in the full sequence.

    Args:
        call: the recorded call.
        rows: its rows, of which the first of each sample is used.
        at_rows: the comparison at single rows; None: they are not used.

    Raises:
        UsageError: if reverse mode does not give the derivative of the block's values.
    """
    if at_rows is not None and at_rows.forward_agrees and at_rows.differences_agree:
        return Independent("both", at_rows.forward)
    _, group = next(rows.disjoint_groups())
    dtype = call.x.dtype
    if dtype != torch.float64 and _runs_in(torch.float64, call, group):
        dtype = torch.float64
    with _full_sequence_in(dtype, call) as call:
        return _settle_in_full_sequence(call, group, at_rows)


@contextmanager
def _full_sequence_in(dtype: torch.dtype, call: BlockCall) -> Iterator[BlockCall]:
    """Hold the weights of a call in a dtype, and yield the call in it."""
    call = call.to(dtype, call.x.device)
    with (
        call.replica.materialize(call.block, dtype=dtype),
        call.replica.materialize(call.final_norm, dtype=dtype),
        replay_errors(call),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield call


def _runs_in(dtype: torch.dtype, call: BlockCall, rows: Rows) -> bool:
    """Whether the code of a block runs in a dtype: it may require another, as nanochat does of its rotary tables."""
    try:
        with _full_sequence_in(dtype, call) as call, torch.no_grad():
            full_sequence(call, rows)(rows.select_sources(call.x))
    except UsageError:
        return False
    return True


def _settle_in_full_sequence(call: BlockCall, rows: Rows, at_rows: Comparison | None) -> Independent:
    x, residual = rows.select_sources(call.x), rows.source is None
    u, v = standard_normal((PROBES, *x.shape), x), standard_normal(x.shape, x, seed=1)
    f, block = full_sequence(call, rows), linearize_full_sequence(call, rows, v)
    steps = STEPS.get(min(x.itemsize, block.least_bytes), ())
    differences = [_differences(f, x, v, _step(x, step)) for step in steps]
    exact = _comparison(x, u, v, block.pullback(u), block.tangent, differences, block, residual)
    reason = exact.reason if at_rows is None else at_rows.reason
    if exact.differences_agree:
        if at_rows is None and exact.forward_agrees:
            return Independent("both", exact.forward)
        return Independent("differences", exact.differences, reason)
    if isnan(exact.differences) and exact.forward_agrees:
        return Independent("forward mode", exact.forward, reason)
    if isnan(exact.differences) and isnan(exact.forward):
        return Independent("none", nan, reason)
    attached, seen = _with_detached(f, x, v)
    if DETACH in seen.names and exact.forward_agrees and attached is not None:
        if any(_distance(attached, difference, v) <= exact.allowed[1] for difference in differences):
            return Independent("differences, detached", exact.forward, "its code detaches tensors")
    raise _refusal(call, exact, sorted(seen.names | set(_custom_functions(f, x))))


def _comparison(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    g: Tensor,
    forward: Tensor | None,
    differences: list[Tensor],
    block: Any,
    residual: bool,
) -> Comparison:
    """Compare g = J^T u with J v by forward mode and by differences with several steps, the best of which counts."""
    precision = min(x.itemsize, block.least_bytes)
    # A row of zeros has no scale from which to take a step.
    if forward is not None:
        differences = [torch.where(x.any(-1, keepdim=True), one, forward) for one in differences]
    elif differences and not x.any(-1).all():
        differences = []
    derivatives = ([] if forward is None else [forward]) + (differences if precision in STEPS else [])
    errors = read([_error(one, u, v, g, residual) for one in derivatives])
    of_forward = nan if forward is None else errors.pop(0)
    return Comparison(
        of_forward,
        min(errors, default=nan),
        (tolerance(x.dtype, block.rounded) if precision in STEPS else FAST, ALLOWED.get(precision, nan)),
        block.no_tangent or ("its result is not finite" if isnan(of_forward) else ""),
        block.rounded,
        (u[0], g[0]),
    )


def _error(derivative: Tensor, u: Tensor, v: Tensor, g: Tensor, residual: bool) -> Tensor:
    """Return the largest error of J v over the rows, relative to J v without the identity, from products with u."""
    # |J^T u| has the size of |J|_F, as |J v| has.
    size = torch.maximum(_norm(derivative - residual * v), _norm(g - residual * u).square().mean(0).sqrt())
    size = torch.maximum(size, FLOOR[v.dtype] * _norm(v))
    difference = (u * derivative).sum(-1, dtype=torch.float64) - (g * v).sum(-1, dtype=torch.float64)
    return (difference.square().mean(0).sqrt() / size).max()


def _distance(value: Tensor, expected: Tensor, v: Tensor) -> float:
    return float((_norm(value - expected) / torch.maximum(_norm(expected), FLOOR[v.dtype] * _norm(v))).max())


_norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)


def _step(x: Tensor, relative: float) -> Float[Tensor, "R 1"]:
    return relative * x.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(x.dtype).tiny ** 0.5)


def _differences(f: RowFunction, x: Tensor, v: Tensor, h: Float[Tensor, "R 1"]) -> Float[Tensor, "R d"]:
    with torch.no_grad():
        return (f(x + h * v) - f(x - h * v)) / (2 * h)


def _with_detached(f: RowFunction, x: Tensor, v: Tensor) -> tuple[Tensor | None, "_WithoutDetach"]:
    """Return J v by forward mode with `detach` as the identity, None if that fails, and what hides values from autograd."""
    seen = _WithoutDetach()

    def attached(x: Tensor) -> Tensor:
        with seen:
            return f(x)

    try:
        return linearize(attached, x, v).tangent, seen
    except FAILURES as error:  # `detach().numpy()`, among others
        raise_device_errors(error)
    return None, seen


def _refusal(call: BlockCall, comparison: Comparison, causes: list[str]) -> UsageError:
    forward, by_values = comparison.forward, comparison.differences
    errors = [f"from forward mode by {forward:.1e}"] if not comparison.forward_agrees and not isnan(forward) else []
    errors += [] if isnan(by_values) else [f"from differences of values by {by_values:.1e}"]
    seen = f"Its code uses {', '.join(causes)}. " if causes else ""
    return UsageError(
        f"block {call.layer} ({call.name}): autograd does not give the derivative of what the block computes; its J v differs "
        f"{' and '.join(errors)} (relative). {seen}Change the code so that autograd differentiates all of it, or measure what "
        "autograd gives: derivative='autograd'"
    )


class _WithoutDetach(TorchFunctionMode):
    """While active, `detach` is the identity; `names` lists what hides values from autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
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
