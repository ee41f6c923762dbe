"""A block as a function of token rows: of single rows with the rest of the sequence frozen, or within full sequences.

J_tt = d block(X)_t / d x_t needs row t alone: every part of a block but attention acts row by row, and inside attention
the row's query meets the *recorded* keys and values of the other rows and its own live ones (`frozen`). So R rows, of
any samples and positions of any recordings, run as a batch of R sequences of length one, and each linear layer is one
product of (cotangents x rows) by its weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import OutOfMemoryError, Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.capture.attention import OriginalAttention, intercept_attention
from tracker.capture.recording import AttentionCall, BlockCall
from tracker.errors import UsageError
from tracker.jacobians.slicing import NotSliceable, Rows, concatenate_argument, slice_argument
from tracker.linalg.jacobian import Linearization, RowFunction, linearize
from tracker.linalg.linear import FreeBuffers, FrozenLinear
from tracker.linalg.precision import Roundings

# What the code of a block may raise when it is run in another way than its author thought of.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
Selection = tuple[BlockCall, Rows]
RowAttention = Callable[[OriginalAttention, Tensor, Tensor, Tensor, Sequence[tuple[AttentionCall, Rows]]], Any]


def restrict(selections: Sequence[Selection], row_attention: RowAttention) -> RowFunction:
    """The block as a function of the selected rows alone, (R, d) -> (R, d), those of each call after one another.

    Rows that are differentiated by others are of one call; the function is then of the sources.

    Raises:
        NotSliceable: if an argument can't be divided into rows; also from the function itself, where attention is not
            the plain self-attention that was recorded.
    """
    if selections[0][1].source is not None:
        ((call, rows),) = selections
        return _restrict_to_sources(call, rows, row_attention)
    call, sizes = selections[0][0], [len(rows.sample) for _, rows in selections]
    divided = [
        {
            name: slice_argument(name, v, call, rows)
            for name, v in call.arguments.arguments.items()
            if name != call.state
        }
        for call, rows in selections
    ]
    arguments = divided[0] if len(divided) == 1 else concatenate_argument("arguments", divided, sizes)
    lengths = [call.x.shape[1] for call, _ in selections]
    if len({len(call.attention) for call, _ in selections}) > 1:
        raise NotSliceable("samples that do not pass through the same attentions")
    recorded = [
        [(past, rows) for past, (_, rows) in zip(at_once, selections, strict=True)]
        for at_once in zip(*(call.attention for call, _ in selections), strict=True)
    ]

    def f(x: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        expected = iter(recorded)

        def answer(
            attend: OriginalAttention, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool
        ) -> Any:
            frozen = next(expected, [])
            own_tokens = bool(frozen) and key.dim() == 4 and key.shape[-2] == 1
            if not own_tokens or any(past.key.shape[-2] != n for (past, _), n in zip(frozen, lengths, strict=True)):
                raise NotSliceable("attention over something other than the block's own tokens")
            return row_attention(attend, query, key, value, frozen)

        with intercept_attention(answer):
            y = call(x[:, None], arguments).squeeze(1)  # not [:, 0], whose derivative is a copy
        if next(expected, []):
            raise NotSliceable("attention that happens in the full sequence does not happen in a single row")
        return y

    return f


def _restrict_to_sources(call: BlockCall, rows: Rows, row_attention: RowAttention) -> RowFunction:
    """What reaches the rows through attention: sources and targets run as 2 R sequences of length one, and a target's
    query meets its source's live key.
    """
    R, targets = len(rows.sample), rows.select(call.x)
    both = Rows(rows.sample.repeat(2), torch.cat([rows.live, rows.token]))

    def of_targets(
        attend: OriginalAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        frozen: Sequence[tuple[AttentionCall, Rows]],
    ) -> Any:
        output = row_attention(attend, query[R:], key[:R], value[:R], [(past, rows) for past, _ in frozen])
        found = output[0] if isinstance(output, tuple) else output
        padded = torch.cat([torch.zeros_like(found), found])  # nobody asks for what the sources see
        return (padded, *output[1:]) if isinstance(output, tuple) else padded

    f = restrict([(call, both)], of_targets)
    return lambda x: f(torch.cat([x, targets]))[R:]


def full_sequence(call: BlockCall, rows: Rows) -> RowFunction:
    """The block as a function of the rows (or of their sources) within their full sequences; no two rows of one sample."""

    def f(x: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        X = call.x.index_put((rows.sample, rows.live), x)
        return rows.select(call(X))

    return f


def linearize_rows(f: RowFunction, x: Tensor, buffers: FreeBuffers | None = None) -> Linearization:
    """Linearize a restricted block, its linear layers through `FrozenLinear`.

    Args:
        buffers: memory for copies of weights.

    Raises:
        NotSliceable: with what the block's code says of sequences of length one.
    """
    with slicing_errors_caught():
        # Attention as plain products: the fused kernels have no rule for many cotangents at once.
        with sdpa_kernel(SDPBackend.MATH), FrozenLinear(buffers), Roundings() as roundings:
            block = linearize(f, x)
        return replace(block, rounded=roundings.seen)


def linearize_full_sequence(call: BlockCall, rows: Rows) -> Linearization:
    """Linearize a block at rows within their full sequences, no two of one sample, by its own code alone.

    Raises:
        UsageError: with what the block's code says of being run again.
    """
    with replay_errors_named(call), sdpa_kernel(SDPBackend.MATH), Roundings() as roundings:
        block = linearize(full_sequence(call, rows), rows.select_sources(call.x))
    return replace(block, rounded=roundings.seen)


@contextmanager
def slicing_errors_caught() -> Iterator[None]:
    """Take what a block's code raises on sequences of length one as a reason not to slice."""
    try:
        yield
    except (NotSliceable, UsageError, OutOfMemoryError):
        raise
    except FAILURES as error:
        raise NotSliceable(f"the block does not run on single rows ({_said(error)})") from error


@contextmanager
def replay_errors_named(
    call: BlockCall, how: str = "again on what the model gave it, with gradients"
) -> Iterator[None]:
    """Name the block in what its code raises when it runs outside of its model.

    Raises:
        UsageError: with that for its cause.
    """
    try:
        yield
    except (NotSliceable, UsageError, OutOfMemoryError):
        raise
    except FAILURES as error:
        raise UsageError(
            f"block {call.layer} ({call.name}) runs in the model's forward pass but can't be run {how} "
            f"({_said(error)}), so its Jacobian can't be measured; change what fails in its code, or name other blocks"
        ) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
