"""Jacobians of recorded blocks at token rows, by the fastest path that passes its checks.

    J_tt = d f(X)_t / d x_t,  f = block - 1        (R, d, d), row = output coordinate, column = input coordinate (eq. 8)

Three paths, tried in this order for every block (`restriction`, `row_attention`):
- formula: single rows, attention by its formula, expanded to first order once per row;
- own code: single rows, attention by the model's own code on frozen keys;
- full sequence: d vector-Jacobian products of the whole sequence, which must reproduce the recorded output.
Values and differences of them (`independent`) are compared at every requested row, and the model is asked about the Jacobians
(`witness`): if it does not agree, the next path forms them.
`CheckResults` states the path, and why it was the full sequence. Cost of the single-row paths: R rows x d cotangents through the
block's weights.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.common.errors import Note, warn_caller
from tracker.common.values import Derivative, Precision
from tracker.jacobians.checks import (
    derivative_error,
    quality,
    reproduces_recorded_output,
    require_reproduction,
)
from tracker.jacobians.independent import (
    DETACHED,
    Independent,
    amplified_rounding,
    differ_from_values,
    settle,
)
from tracker.jacobians.judge import BOUNDS, FIRST
from tracker.jacobians.restriction import (
    CallRows,
    RowAttention,
    evaluating_full_sequence,
    evaluating_rows,
    full_sequence,
    linearize_full_sequence,
    linearize_rows,
    replay_errors,
    restrict,
    slicing_errors,
)
from tracker.jacobians.row_attention import by_formula, by_own_code
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.jacobians.witness import Witness
from tracker.linalg.jacobian import Linearization, RowFunction, dense_jacobian
from tracker.linalg.precision import FAST, float32_products, relative_error, tolerance
from tracker.linalg.transfer import moved, read, to_device
from tracker.model.proposals import BlocksNotFound
from tracker.model.recording import BlockCall
from tracker.model.replica import Replica
from tracker.spans.calls import NOT_SLICEABLE, SpanCall

Result = TypeVar("Result")


@dataclass(frozen=True)
class CheckResults:
    """The path by which a block's Jacobians were computed, and the errors of its checks."""

    path: Literal["formula", "own code", "full sequence"]  # how the rows' attention was computed
    value_error: float
    # NaN where single rows are not compared with the full sequence: but for blocks with several attentions, and pairs of rows
    derivative_error: float
    # Of each row, against differences of values; NaN where they were not used
    independent_errors: tuple[float, ...]

    @property
    def independent_error(self) -> float:
        """The largest error of the rows against differences of values."""
        return max(self.independent_errors)

    @property
    def sliced(self) -> bool:
        """Whether single rows were used."""
        return self.path != "full sequence"


@dataclass(frozen=True)
class _Read:
    """What was read of a call's Jacobians."""

    finite: bool
    hidden: bool  # whether rounding hides some row's J from the dtype
    # Of each witness that was asked about rows of the call: the samples, the rows, and J^T u and J v
    products: list[tuple[Witness, Tensor, Tensor, Float[Tensor, "2 _ d"]]]


# Why single rows are not used where the model says otherwise
OTHER_DERIVATIVE = "its derivative at single rows is not that of the model"
MOVING_MASK = "a mask of its attention depends on its state, which single rows hold constant"
# Why single rows of a block without attention that is recognised do not give its values.
OWN_ATTENTION = (
    "its output at a token depends on the rest of the sequence by code of its own, such as attention written out as q @ k.T, a "
    "mask and softmax; with F.scaled_dot_product_attention, single rows are used"
)
# The fast one first
PATHS: dict[Any, RowAttention] = {"formula": by_formula, "own code": by_own_code}


@dataclass(eq=False)
class Jacobians:
    """Jacobians of a replica's recorded blocks. Keeps the results of checks, and why layers used the full sequence.

    Args:
        replica: the replica that was recorded.
        precision: of the matrix products on single rows, if the dtype is float32: "float32", "tf32" (CUDA devices) or
            "bfloat16". Checks, norms, the residual stream and attention within a row stay in float32.
        memory: how many bytes the products that run at once may keep alive.
        advance: called by those who use them, with the number of rows that have passed a stage in one block.
        derivative: "autograd" leaves out the comparison with differences of values (`independent`).
    """

    replica: Replica
    precision: Precision = "float32"
    memory: int = 1 << 30
    advance: Callable[[int], None] = lambda _: None
    derivative: Derivative = "checked"

    def __post_init__(self) -> None:
        # Layer -> the check, where differences do not agree or can't be used.
        self.independent: dict[int, Independent] = {}
        self.fallbacks: dict[int, str] = {}  # layer -> why the full sequence was used
        # Whether the state enters the blocks through norms alone; None: not asked yet
        self.through_norms: bool | None = None
        self.witnesses: list[Witness] = []  # the caller's model, asked about recorded calls
        # By layer: the paths whose Jacobians are not those of the model
        self._refused: dict[int, set[str]] = {}
        self._reproduced: dict[int, bool] = {}

    def in_float32(self) -> "Jacobians":
        """Return the same with all products in float32."""
        exact = copy.copy(self)
        exact.precision = "float32"
        return exact

    @contextmanager
    def with_more_memory(self, size: int) -> Iterator[None]:
        """Let products keep so many bytes more alive in a context."""
        self.memory += size
        try:
            yield
        finally:
            self.memory -= size

    def __call__(
        self, selections: Sequence[CallRows]
    ) -> list[tuple[Float[Tensor, "R d d"], CheckResults]]:
        """Return J_tt (R, d, d) of the residual function f = block - 1 at the rows selected of each call, in the recorded dtype.

        The calls are of one block, in one recording or several; their rows pass through its weights together. For rows with
        other sources, return J_{t1 t2}, t1 the source.

        Raises:
            UsageError: if even the full sequence does not reproduce the recorded output (random or stateful block).
            FloatingPointError: if a Jacobian overflows.
        """
        dtype, known = selections[0][0].x.dtype, dict(self.independent)
        results = self._formed(dtype, selections)
        answers = self._read(selections, results)
        for i, (call, rows) in enumerate(selections):
            # For rows with other sources no identity is subtracted, so its rounding can't hide small entries.
            if rows.source is None and answers[i].hidden:
                ((J, checks),) = self._formed(torch.float64, selections[i : i + 1])
                results[i] = J.to(dtype), checks
                (answers[i],) = self._read(selections[i : i + 1], results[i : i + 1])
            if not answers[i].finite:
                raise FloatingPointError(
                    f"the Jacobian of block {call.layer} ({call.name}) is not finite (overflow or NaN in {call.x.dtype})"
                )
        (call, _), (_, first) = selections[0], results[0]
        try:
            for (call, rows), answer, (_, checks) in zip(selections, answers, results, strict=True):
                self._compare_with_model(call, rows, answer, checks)
        except BlocksNotFound:
            if not first.sliced:
                raise
            # Single rows need not stand for the full sequence, which may be what the model computes.
            self._refused.setdefault(call.layer, set()).add(first.path)
            self.independent = known  # the notes are of Jacobians that are not used
            return self(selections)
        return results

    def _read(
        self,
        selections: Sequence[CallRows],
        results: Sequence[tuple[Float[Tensor, "_ d d"], CheckResults]],
    ) -> list[_Read]:
        """Read what is known of formed Jacobians before they are used, for which the host waits once."""
        tensors, found = [], []
        for (call, rows), (J, _) in zip(selections, results, strict=True):
            tensors.append(quality(J, J.dtype))
            of_call = [
                (witness, *products)
                for witness in self.witnesses
                if (products := witness.products(call, rows, J)) is not None
            ]
            tensors += [products for *_, products in of_call]
            found.append(of_call)
        values = iter(moved(tensors, "cpu"))
        answers = []
        for of_call in found:
            finite, hidden = next(values).bool().tolist()
            products = [(*of_one, next(values).double()) for *of_one, _ in of_call]
            answers.append(_Read(finite, hidden, products))
        return answers

    def _compare_with_model(
        self, call: BlockCall, rows: Rows, answer: _Read, checks: CheckResults
    ) -> None:
        """Compare Jacobians with what the caller's model says, if it was asked about this call."""
        for witness in self.witnesses:
            witness.require_values(call.layer)
        outcome = self.independent.get(call.layer)
        of_values = self.derivative != "autograd" and (
            outcome is None or outcome.method != DETACHED
        )
        path = PATHS.get(checks.path)
        for witness, asked, at, products in answer.products:
            witness.judge(
                call,
                asked,
                products,
                call.x.itemsize,
                partial(amplified_rounding, call, rows.subset(at), path),
                exact=self.precision == "float32",
                differences=of_values,
            )

    def _formed(
        self, dtype: torch.dtype, selections: Sequence[CallRows]
    ) -> list[tuple[Float[Tensor, "R d d"], CheckResults]]:
        """Return the Jacobians of all selections, together if a path passes its checks on all of them, else one by one."""
        selections = [(call.to(dtype, self.replica.device), rows) for call, rows in selections]
        call = selections[0][0]
        with (
            self.replica.materialize(call.block, dtype=dtype),
            self.replica.materialize(call.final_norm, dtype=dtype),
        ):
            for witness in self.witnesses:
                witness.require_apart(call)
            try:
                J, checks = self._sliced(selections)
                return list(
                    zip(J.split([len(rows) for _, rows in selections]), checks, strict=True)
                )
            except NotSliceable as why:
                reason = str(why)
            if len(selections) == 1:
                return [self._full(*selections[0], reason)]
        return [result for selection in selections for result in self._formed(dtype, [selection])]

    def _sliced(
        self, selections: Sequence[CallRows]
    ) -> tuple[Float[Tensor, "R d d"], list[CheckResults]]:
        """Use the first path that passes its checks; if none does, the first whose error the block's own rounding explains."""
        if isinstance(selections[0][0], SpanCall):
            raise NotSliceable(NOT_SLICEABLE)
        layer = selections[0][0].layer
        if any(layer in witness.moving for witness in self.witnesses):
            raise NotSliceable(MOVING_MASK)
        refused = self._refused.get(layer, ())
        # Not the error: its traceback holds the tensors of the path that failed
        reason = OTHER_DERIVATIVE
        attempts = [(path, False) for path in PATHS if path not in refused]
        for path, rounded in attempts:
            try:
                return self._by_path(path, selections, rounded)
            except NotSliceable as why:
                reason = str(why)
                if isinstance(why, RoundedInside) and not rounded:
                    attempts.append((path, True))
        raise NotSliceable(reason)

    def _full(
        self, call: BlockCall, rows: Rows, reason: str
    ) -> tuple[Float[Tensor, "R d d"], CheckResults]:
        J, value_error, rounded = full_sequence_jacobian(
            call, rows, self.replica.dtype, self.memory
        )
        torch.linalg.diagonal(J).sub_(int(rows.source is None))
        if not self.fallbacks:
            n = call.x.shape[1]
            warn_caller(
                f"block {call.layer} ({call.name}) is measured over the full sequence, as exact as single rows and with up to "
                f"{n} times the operations ({n} tokens): {reason}. The Dataset's attribute 'fallbacks' lists all such blocks",
                Note,
            )
        self.fallbacks[call.layer] = reason
        errors = torch.empty(len(rows))
        for index, group in rows.disjoint_groups():
            f = full_sequence(call, group)
            (at,) = to_device(J.device, index)
            (of_group,) = self._compare(
                [(call, group)], f, J[at], rounded, None, evaluating_full_sequence(call)
            )
            errors[index] = torch.tensor(of_group)
        return J, CheckResults("full sequence", value_error, nan, tuple(errors.tolist()))

    def _compare(
        self,
        selections: Sequence[CallRows],
        f: RowFunction,
        J: Float[Tensor, "R d d"],
        rounded: bool,
        row_attention: RowAttention | None,
        evaluating: AbstractContextManager[None],
        y: Float[Tensor, "R d"] | None = None,
    ) -> list[tuple[float, ...]]:
        """Return the error of J v against differences of values at each row of each selection.

        Args:
            f: the block at the rows of all selections.
            y: its output there, if it was computed in the same context.
            rounded: whether the block's code rounds.
            row_attention: that of single rows; None: they are in the full sequence.
            evaluating: the context in which f runs.
        """
        if self.derivative == "autograd":
            return [(nan,) * len(rows) for _, rows in selections]
        x = torch.cat([rows.select_sources(call.x) for call, rows in selections])
        residual = selections[0][1].source is None
        bounds = BOUNDS[4 if rounded else x.itemsize]
        allowed = bounds.differences if self.precision == "float32" else FAST
        with evaluating:
            errors = differ_from_values(f, x, J, residual, bounds.steps[FIRST], y, allowed)
        found, sizes = [], [len(rows) for _, rows in selections]
        for (call, rows), of_rows, of_call in zip(
            selections, errors.split(sizes), J.split(sizes), strict=True
        ):
            differ = ~(of_rows <= allowed)  # also where an error is NaN
            if differ.any():
                (at,) = to_device(J.device, differ)
                outcome = settle(call, rows.subset(differ), of_call[at], allowed, row_attention)
                self._note(call, outcome)
                of_rows = of_rows.masked_fill(differ, outcome.error)
            found.append(tuple(of_rows.tolist()))
        return found

    def _note(self, call: BlockCall, outcome: Independent) -> None:
        """Keep the largest error of each layer that does not agree with differences, and warn of the first detached branch."""
        if outcome.method == "differences":
            return
        if outcome.method == DETACHED and DETACHED not in {
            known.method for known in self.independent.values()
        }:
            warn_caller(
                f"block {call.layer} ({call.name}): {outcome.reason} (relative); its Jacobian is that with these tensors held "
                "constant; the Dataset's attribute 'independent_checks' lists all such blocks"
            )
        known = self.independent.get(call.layer)
        if known is None or not outcome.error <= known.error:
            self.independent[call.layer] = outcome

    def _reproduces(self, call: BlockCall) -> bool:
        if call.layer not in self._reproduced:
            self._reproduced[call.layer] = reproduces_recorded_output(call, self.replica.dtype)
        return self._reproduced[call.layer]

    def _require_right(
        self,
        path: Any,
        selections: Sequence[CallRows],
        block: Linearization,
        allowed: float,
        rounded: bool,
    ) -> tuple[list[float], list[float]]:
        """Return the errors of the value and the derivative in each selection.

        Args:
            allowed: the largest error of a derivative.
            rounded: whether rounding may explain the error of a value.

        Raises:
            NotSliceable: if one is too large.
        """
        recorded_dtype = self.replica.dtype
        outputs, errors = block.y.split([len(rows) for _, rows in selections]), []
        for (call, rows), y in zip(selections, outputs, strict=True):
            before, recorded = rows.select(call.x), rows.select(call.y)
            errors.append(relative_error(y - before, recorded - before, recorded, recorded_dtype))
        value_errors = read(errors)  # the host waits once for the values of all selections
        derivative_errors = []
        for (call, rows), value_error in zip(selections, value_errors, strict=True):
            if not value_error <= tolerance(recorded_dtype, rounded):
                if not call.attention and not block.rounded:
                    raise NotSliceable(OWN_ATTENTION)
                raise _check_failed("value", value_error, recorded_dtype, block.rounded)
            error = nan
            groups = [group for _, group in rows.disjoint_groups()]
            # Of several attentions, one may read what another wrote anywhere in the sequence. The model is not asked about rows
            # with other sources.
            if len(call.attention) > 1 or rows.source is not None:
                tried = groups if len(call.attention) > 1 else [groups[0], groups[-1]]
                error = max(derivative_error(call, group, PATHS[path]) for group in tried)
                if not error <= allowed:
                    raise _check_failed("derivative", error, call.x.dtype, block.rounded)
            derivative_errors.append(error)
        return value_errors, derivative_errors

    def _by_path(
        self, path: Any, selections: Sequence[CallRows], rounded: bool
    ) -> tuple[Float[Tensor, "R d d"], list[CheckResults]]:
        """Use one path; with `rounded`, allow an error that the block's own rounding to float32 explains."""
        x = torch.cat([rows.select_sources(call.x) for call, rows in selections])
        f = restrict(selections, PATHS[path])
        block = linearize_rows(f, x)
        y = block.y
        # Keys and values of a float32 pass carry its rounding.
        allowed = selections[0][0].recorded_coarser or (block.rounded and rounded)
        value_errors, derivative_errors = self._require_right(
            path, selections, block, tolerance(x.dtype, allowed), allowed
        )
        if rounded and not all(self._reproduces(c) for c, _ in selections):
            raise NotSliceable(
                "the block does not reproduce the recorded output when it runs again"
            )
        # Checked above; now with bfloat16 products
        if self.precision == "bfloat16" and x.dtype == torch.float32:
            with torch.autocast(x.device.type, torch.bfloat16):
                block = linearize_rows(f, x)
        # A cotangent passes through copies of the keys where the model's own code runs.
        copied = _keys_and_values(selections) if path == "own code" else 0
        chunk = _chunk(16 * x.numel() + 2 * copied, x, self.memory)
        identity = selections[0][1].source is None
        products = float32_products("tf32") if self.precision == "tf32" else nullcontext()
        with slicing_errors(), products:
            J = dense_jacobian(block, chunk, identity)
        errors = self._compare(selections, f, J, block.rounded, PATHS[path], evaluating_rows(), y)
        of_selections = zip(value_errors, derivative_errors, errors, strict=True)
        return J, [CheckResults(path, *of_selection) for of_selection in of_selections]


def _keys_and_values(selections: Sequence[CallRows]) -> int:
    """Return how many scalars the keys and values of all rows have."""
    return sum(
        len(rows) * (past.key[0].numel() + past.value[0].numel())
        for call, rows in selections
        for past in call.attention
    )


class RoundedInside(NotSliceable):
    """A check's error is small enough to be the block's own rounding to float32."""


def _check_failed(check: str, error: float, dtype: torch.dtype, rounds: bool) -> NotSliceable:
    exception = RoundedInside if error <= tolerance(dtype, rounds) else NotSliceable
    return exception(
        f"the faster method, single rows, failed its {check} check (error {error:.1e}) and was not used"
    )


def _chunk(scalars: int, x: Float[Tensor, "R d"], memory: int) -> int:
    """Return how many cotangents to run at once if each keeps `scalars` alive; one cotangent of one row keeps about 16 d.

    So many rows (cotangents x token rows) that matrix products run at their full rate. Narrow models need many, as PyTorch's
    overhead is large compared with their products. On a CPU at most some 16 MB: the C library reuses memory of that size for the
    next layer, and fresh memory can cost as much as the product.
    """
    d = x.shape[-1]
    rows = max(256, min(4096, (1 << 20) // d)) if x.is_cpu else 4096
    return max(1, min(d, min(memory // x.itemsize, 16 * d * rows) // scalars))


def full_sequence_jacobian(
    call: BlockCall,
    rows: Rows,
    recorded_dtype: torch.dtype,
    memory: int = 1 << 30,
) -> tuple[Float[Tensor, "R d d"], float, bool]:
    """Return the block's Jacobians (identity included) by full-sequence vector-Jacobian products, the value error, and whether
    the block's code rounds.

    It takes one row of every sample at a time: a block mixes tokens, not samples.
    """
    x, before, recorded = rows.select_sources(call.x), rows.select(call.x), rows.select(call.y)
    J = x.new_empty(*x.shape, x.shape[-1])
    B, n, d = call.x.shape
    y, rounded = torch.empty_like(x), False
    for index, group in rows.disjoint_groups():
        block, (at,) = linearize_full_sequence(call, group), to_device(x.device, index)
        with replay_errors(call):
            J[at] = dense_jacobian(block, _chunk(16 * B * n * d, x, memory))
        y[at], rounded = block.y, rounded or block.rounded
    return (
        J,
        require_reproduction(call, y - before, recorded - before, recorded, recorded_dtype),
        rounded,
    )
