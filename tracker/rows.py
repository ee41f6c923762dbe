"""A block restricted to the token rows in question, the rest of the sequence frozen; it proves itself.

J_tt = d block(X)_t / d x_t needs row t alone: every part of a block but attention acts row by row, and inside attention
the row's query meets the *recorded* keys and values of the other rows and its own live ones (`frozen`). So R rows, of
any samples and positions of any recordings, run as a batch of R sequences of length one, and all their Jacobians come
from d cotangents. Each linear layer then is one product of (cotangents x rows) by its weights.

Two proofs, or the next path serves instead: attention by its formula, by the model's own code on the frozen keys, the
full-sequence Jacobian. The evidence says which, and why the full sequence.
- value, at every use: the sliced output equals the recorded output of that row;
- derivative, once per block and way of calling it: J^T u for a random u equals the full-sequence vector-Jacobian
  product, at the first and the last row asked for of every sample (at position 0 a causal row attends to itself alone
  and proves little: the last position stands in for it). The value alone would let a detached key pass, or two
  attentions named as one block.
Errors are relative to the residual function f = block - 1, not to the block's output. Below a floor, |f| < 1e-2 |x| in
float32, rounding of the sum x + f hides it: a Jacobian that small is found again in float64.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.arguments import NotSliceable, Rows, join, of_rows
from tracker.attention import Attend, answering
from tracker.blocks import UsageError
from tracker.frozen import by_formula, by_own_code
from tracker.jacobian import (
    Linearization,
    LinearOperator,
    RowFunction,
    converting_operator,
    cotangent_chunk,
    dense_jacobian,
    linearize,
    matrix_operator,
    residual_operator,
    stacked_operator,
)
from tracker.recording import AttentionCall, BlockCall
from tracker.replica import Replica

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
FLOOR = {torch.float32: 1e-2, torch.float64: 1e-5}  # of |f| / |x|: where rounding of x + f reaches the tolerance
BUDGET = 1 << 25  # scalars alive in one chunk of cotangents: 128 MiB in float32
PROBES = 8  # random products that stand for a Jacobian whose entries are not found

Selection = tuple[BlockCall, Rows]
Answered = Callable[[Attend, Tensor, Tensor, Tensor, Sequence[tuple[AttentionCall, Rows]]], Any]


@dataclass(frozen=True)
class Evidence:
    """How a block's Jacobians were found, and the proofs' errors."""

    path: Literal["formula", "own code", "full sequence"]  # what answered the rows' queries
    value_error: float
    derivative_error: float  # NaN where the full sequence served: it is its own reference
    reason: str = ""  # why the full sequence served

    @property
    def sliced(self) -> bool:
        """Whether the rows alone served."""
        return self.path != "full sequence"


PATHS: dict[Any, Answered] = {"formula": by_formula, "own code": by_own_code}  # the fast one first


class Jacobians:
    """Jacobians of a replica's recorded blocks; remembers which have proved their derivative, and which layers could
    not be sliced.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.fallbacks: dict[int, str] = {}  # layer -> why the full sequence served
        self._proved: dict[Any, float] = {}

    def __call__(self, selections: Sequence[Selection]) -> list[tuple[Float[Tensor, "R d d"], Evidence]]:
        """J_tt of the residual function f = block - 1 at the rows selected of each call, in the recorded dtype.

        The calls are of one block, in one recording or several; their rows pass through its weights together.

        Raises:
            UsageError: if even the full sequence does not reproduce the recorded output (random or stateful block).
            FloatingPointError: if a Jacobian overflows.
        """
        dtype = selections[0][0].x.dtype
        results = []
        for operator, some, evidence in self._operators(dtype, selections):
            J = operator.dense().split([len(rows.sample) for _, rows in some])
            results += zip(J, evidence, strict=True)
        for i, (J, _) in enumerate(results):
            if _hidden_by_rounding(J, dtype):
                ((operator, _, (evidence,)),) = self._operators(torch.float64, selections[i : i + 1])
                results[i] = operator.dense().to(dtype), evidence
            _check_finite(results[i][0], selections[i][0])
        return results

    def operator(self, selections: Sequence[Selection]) -> tuple[LinearOperator, list[Evidence]]:
        """The same Jacobians, through their products with (R, d, m) blocks alone: R counts all selected rows, those of
        each call after one another.

        Where the full sequence serves, its Jacobian is found entry by entry all the same.

        Raises:
            UsageError: as above.
            FloatingPointError: as above, so far as a few random products show it.
        """
        call, dtype = selections[0][0], selections[0][0].x.dtype
        for inside in (dtype, torch.float64):
            operators, parts, evidence = zip(*self._operators(inside, selections), strict=True)
            sizes = [sum(len(rows.sample) for _, rows in part) for part in parts]
            operator = stacked_operator(operators, sizes)
            R, d = sum(sizes), call.x.shape[-1]
            generator = torch.Generator().manual_seed(0)
            probes = torch.randn(R, d, PROBES, generator=generator, dtype=torch.float64).to(call.x.device, inside)
            products = operator.apply_transpose(probes) * (d / PROBES) ** 0.5  # as large as J itself, on average
            _check_finite(products, call)
            if inside == torch.float64 or not _hidden_by_rounding(products, dtype):
                break
        operator = operator if inside == dtype else converting_operator(operator, inside, dtype)
        return operator, [of_one for some in evidence for of_one in some]

    def _operators(
        self, dtype: torch.dtype, selections: Sequence[Selection]
    ) -> list[tuple[LinearOperator, Sequence[Selection], list[Evidence]]]:
        """For all selections together where some path proves itself on them all, else for each by itself."""
        selections = [(call.to(dtype), rows) for call, rows in selections]
        call = selections[0][0]
        with self.replica.weights(call.block, dtype=dtype), self.replica.weights(call.final_norm, dtype=dtype):
            try:
                operator, evidence = self._sliced(selections)
                return [(operator, selections, evidence)]
            except NotSliceable as why:
                reason = str(why)
            if len(selections) == 1:
                operator, evidence = self._full(*selections[0], reason)
                return [(operator, selections, [evidence])]
        return [part for selection in selections for part in self._operators(dtype, [selection])]

    def _sliced(self, selections: Sequence[Selection]) -> tuple[LinearOperator, list[Evidence]]:
        """By the first path that proves itself."""
        reason = NotSliceable()
        for path in PATHS:
            try:
                return self._by_path(path, selections)
            except NotSliceable as why:
                reason = why
        raise reason

    def _full(self, call: BlockCall, rows: Rows, reason: str) -> tuple[LinearOperator, Evidence]:
        J, value_error = full(call, rows, self.replica.dtype)
        J.diagonal(dim1=-2, dim2=-1).sub_(1)
        if not self.fallbacks:
            warnings.warn(
                f"block {call.layer} ({call.name}) is measured over the full sequence, slowly: {reason}", stacklevel=5
            )
        self.fallbacks[call.layer] = reason
        return matrix_operator(J), Evidence("full sequence", value_error, float("nan"), reason)

    def _by_path(self, path: Any, selections: Sequence[Selection]) -> tuple[LinearOperator, list[Evidence]]:
        sizes = [len(rows.sample) for _, rows in selections]
        x = torch.cat([rows.of(call.x) for call, rows in selections])
        block = _on_single_rows(restrict(selections, PATHS[path]), x)
        evidence, keys = [], 0
        for (call, rows), x_, y_ in zip(selections, x.split(sizes), block.y.split(sizes), strict=True):
            recorded = rows.of(call.y)
            value_error = _relative_error(y_ - x_, recorded - x_, recorded, self.replica.dtype)
            if not value_error <= TOLERANCE[self.replica.dtype]:
                raise NotSliceable(f"value proof failed: the rows alone give another output (error {value_error:.1e})")
            kind = (path, *_kind(call))
            if kind not in self._proved:
                self._proved[kind] = derivative_error(call, rows, PATHS[path])
            if not self._proved[kind] <= TOLERANCE[x.dtype]:
                raise NotSliceable(f"derivative proof failed (error {self._proved[kind]:.1e})")
            evidence.append(Evidence(path, value_error, self._proved[kind]))
            if path == "own code":
                keys += sum(len(x_) * (a.key[0].numel() + a.value[0].numel()) for a in call.attention)
        return residual_operator(block, cotangent_chunk(16 * x.numel() + 2 * keys, BUDGET, x.shape[-1])), evidence


def _hidden_by_rounding(J: Float[Tensor, "R d m"], dtype: torch.dtype) -> bool:
    """Whether some row's root mean square singular value is below the floor of this dtype."""
    return dtype != torch.float64 and bool((torch.linalg.matrix_norm(J) < FLOOR[dtype] * J.shape[-2] ** 0.5).any())


def _check_finite(J: Tensor, call: BlockCall) -> None:
    if not torch.isfinite(J).all():
        raise FloatingPointError(
            f"the Jacobian of block {call.layer} ({call.name}) is not finite (overflow or NaN in {call.x.dtype})"
        )


def restrict(selections: Sequence[Selection], answered: Answered) -> RowFunction:
    """The block as a function of the selected rows alone, (R, d) -> (R, d), those of each call after one another.

    Raises:
        NotSliceable: if an argument can't be divided into rows; also from the function itself, where attention is not
            the plain self-attention that was recorded.
    """
    call, sizes = selections[0][0], [len(rows.sample) for _, rows in selections]
    divided = [
        {name: of_rows(name, v, call, rows) for name, v in call.arguments.arguments.items() if name != call.state}
        for call, rows in selections
    ]
    arguments = divided[0] if len(divided) == 1 else join("arguments", divided, sizes)
    lengths = [call.x.shape[1] for call, _ in selections]
    if len({len(call.attention) for call, _ in selections}) > 1:
        raise NotSliceable("samples that do not pass through the same attentions")
    recorded = [
        [(past, rows) for past, (_, rows) in zip(at_once, selections, strict=True)]
        for at_once in zip(*(call.attention for call, _ in selections), strict=True)
    ]

    def f(x: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        expected = iter(recorded)

        def answer(attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool) -> Any:
            frozen = next(expected, [])
            own_tokens = bool(frozen) and key.dim() == 4 and key.shape[-2] == 1
            if not own_tokens or any(past.key.shape[-2] != n for (past, _), n in zip(frozen, lengths, strict=True)):
                raise NotSliceable("attention over something other than the block's own tokens")
            return answered(attend, query, key, value, frozen)

        with answering(answer):
            y = call(x[:, None], arguments)[:, 0]
        if next(expected, []):
            raise NotSliceable("attention that happens in the full sequence does not happen in a single row")
        return y

    return f


def full(call: BlockCall, rows: Rows, recorded_in: torch.dtype) -> tuple[Float[Tensor, "R d d"], float]:
    """Jacobians of the block (identity included) by full-sequence vector-Jacobian products, and the value error.

    One row of every sample at a time: samples do not mix in a block, tokens do.
    """
    x, recorded = rows.of(call.x), rows.of(call.y)
    J = x.new_empty(*x.shape, x.shape[-1])
    B, n, d = call.x.shape
    y = torch.empty_like(x)
    for index, wave in rows.waves():
        with sdpa_kernel(SDPBackend.MATH):
            block = linearize(full_sequence(call, wave), x[index])
            J[index] = dense_jacobian(block.pullback, block.y, cotangent_chunk(16 * B * n * d, BUDGET, d))
            y[index] = block.y
    value_error = _relative_error(y - x, recorded - x, recorded, recorded_in)
    if not value_error <= TOLERANCE[recorded_in]:
        raise UsageError(
            f"block {call.layer} ({call.name}) does not reproduce its own output (relative error {value_error:.1e}): "
            "it is random or keeps state between calls, so it has no Jacobian to measure"
        )
    return J, value_error


def full_sequence(call: BlockCall, rows: Rows) -> RowFunction:
    """The block as a function of the rows within their full sequences; no two rows of one sample."""

    def f(x: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        X = call.x.index_put((rows.sample, rows.token), x)
        return rows.of(call(X))

    return f


def derivative_error(call: BlockCall, rows: Rows, answered: Answered) -> float:
    """Relative difference of J^T u, sliced against full sequence, for random u at the first and the last row asked for
    of every sample; the last position of the sequence instead, where only position 0 is asked for.
    """
    n, device = call.x.shape[1], call.x.device
    samples = rows.sample.unique()
    asked = [rows.token[rows.sample == sample] for sample in samples]
    last = [int(t.max()) or n - 1 for t in asked]
    first = [min(int(t.min()), l) or l for t, l in zip(asked, last, strict=True)]
    return max(
        _derivative_error_at(call, Rows(samples, torch.tensor(at, device=device)), answered)
        for at in {*map(tuple, (first, last))}
    )


def _derivative_error_at(call: BlockCall, rows: Rows, answered: Answered) -> float:
    x = rows.of(call.x)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    sliced = _on_single_rows(restrict([(call, rows)], answered), x)
    with sdpa_kernel(SDPBackend.MATH):
        expected = linearize(full_sequence(call, rows), x).pullback(u[None])[0]
    return _relative_error(sliced.pullback(u[None])[0] - u, expected - u, u, x.dtype)


def _on_single_rows(f: RowFunction, x: Tensor) -> Linearization:
    try:
        # Attention as plain products: the fused kernels have no rule for many cotangents at once.
        with sdpa_kernel(SDPBackend.MATH):
            return linearize(f, x)
    except torch.OutOfMemoryError:
        raise
    # What code not written for a sequence of length one says of it.
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        AssertionError,
    ) as error:
        raise NotSliceable(f"the block does not run on single rows ({type(error).__name__}: {error})") from error


def _relative_error(f: Tensor, reference: Tensor, scale: Tensor, known_in: torch.dtype) -> float:
    """Largest over the rows of |f - reference| / max(|reference|, floor |scale|); 0 where they agree exactly.

    The floor is that of the precision the reference is known in, whatever precision it is compared in.
    """
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)  # squares of large states overflow float32
    size = torch.maximum(norm(reference), FLOOR[known_in] * norm(scale))
    difference = norm(f - reference)
    return float(torch.where(difference == 0, 0.0, difference / size).max())


def _kind(call: BlockCall) -> Any:
    """What a derivative proof holds for: one block, and how it and its attention are called."""
    given = tuple((name, type(value).__name__) for name, value in call.arguments.arguments.items())
    attention = tuple((a.mask is None, a.causal) for a in call.attention)
    return call.layer, call.x.dtype, given, attention
