"""Restrict a block to token rows: single rows with the rest of the sequence frozen, or rows within full sequences.

J_tt = d block(X)_t / d x_t needs row t alone: every part of a block but attention acts row by row, and in attention the row's
query takes the *recorded* keys and values of the other rows and the row's own, live ones (`row_attention`). So R rows, of any
samples, positions and recordings, run as a batch of R sequences of length one, (R, 1, d), and each linear layer is one
product of (cotangents x rows) with its weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tracker.common.errors import UsageError
from tracker.devices import raise_device_errors
from tracker.jacobians.slicing import NotSliceable, Rows, concatenate_argument, slice_argument
from tracker.linalg.jacobian import Linearization, RowFunction, linearize
from tracker.linalg.linear import FrozenLinear
from tracker.linalg.precision import Roundings
from tracker.model.attention import OriginalAttention, intercept_attention
from tracker.model.proposals import BlocksNotFound, chained
from tracker.model.recording import AttentionCall, BlockCall

# Exceptions that a block's code may raise when it runs outside its model or on sequences of length one.
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
CallRows = tuple[BlockCall, Rows]
# Of the rows, and the recorded attentions, each with those of the rows that belong to it
RowAttention = Callable[[OriginalAttention, Sequence[tuple[AttentionCall, Rows]]], Any]


def restrict(selections: Sequence[CallRows], row_attention: RowAttention) -> RowFunction:
    """Return the block as a function of the selected rows alone, (R, d) -> (R, d), the rows of each call after one another.

    For rows with other sources it is a function of the sources.

    Raises:
        NotSliceable: if an argument can't be divided into rows; also from the function itself, where attention is not
            the plain self-attention that was recorded.
    """
    if selections[0][1].source is not None:
        return _restrict_to_sources(selections, row_attention)
    call = selections[0][0]
    sizes = [len(rows) for _, rows in selections]
    divided = []
    for call_of_rows, rows in selections:
        arguments = dict(call_of_rows.arguments.arguments)
        # Every evaluation sets the state itself; blocks named by boundaries have no argument of that name.
        arguments.pop(call_of_rows.state, None)
        divided.append(
            {name: slice_argument(name, v, call_of_rows, rows) for name, v in arguments.items()}
        )
    arguments = divided[0]
    if len(divided) > 1:
        arguments = concatenate_argument("arguments", divided, sizes)
    lengths = [call.x.shape[1] for call, _ in selections]
    # Attentions are matched by their order in the block.
    if len({len(call.attention) for call, _ in selections}) > 1:
        raise NotSliceable("its samples do not pass through the same attentions")
    recorded = [
        [(past, rows) for past, (_, rows) in zip(at_once, selections, strict=True)]
        for at_once in zip(*(call.attention for call, _ in selections), strict=True)
    ]

    def f(x: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        expected = iter(recorded)

        def handler(attention: OriginalAttention) -> Any:
            frozen, key = next(expected, []), attention.key
            own_token = bool(frozen) and key.dim() == 4 and key.shape[-2] == 1
            # In the full sequence, too, it attended to the block's own tokens: all of them, and no others.
            recorded_lengths = [past.key.shape[-2] for past, _ in frozen]
            if not own_token or recorded_lengths != lengths:
                raise NotSliceable("its attention is over something other than its own tokens")
            return row_attention(attention, frozen)

        with intercept_attention(handler):
            y = call(x[:, None], arguments).squeeze(1)  # not [:, 0], whose derivative is a copy
        # An attention that was recorded but not called: the block took another branch for one token.
        if next(expected, []):
            raise NotSliceable("its attention in the full sequence does not happen in a single row")
        if y.shape != x.shape:
            raise NotSliceable(f"it returns {tuple(y.shape)} for single rows {tuple(x.shape)}")
        return y

    return f


def _restrict_to_sources(
    selections: Sequence[CallRows], row_attention: RowAttention
) -> RowFunction:
    """Return the rows as a function of their sources: the sources run first, then the targets, whose queries take the live
    keys and values of their sources.

    The derivative passes through the targets from their attention on, and through the sources up to their keys and values.
    """
    targets = torch.cat([rows.select(call.x) for call, rows in selections])
    live: list[tuple[Tensor, Tensor]] = []  # keys and values of the sources, by attention

    def of_sources(
        attention: OriginalAttention, frozen: Sequence[tuple[AttentionCall, Rows]]
    ) -> Any:
        live.append((attention.key, attention.value))
        return row_attention(attention, frozen)

    def of_targets(
        attention: OriginalAttention, frozen: Sequence[tuple[AttentionCall, Rows]]
    ) -> Any:
        pasts = [(past, rows) for (past, _), (_, rows) in zip(frozen, selections, strict=True)]
        key, value = live.pop(0)
        return row_attention(replace(attention, key=key, value=value), pasts)

    run_sources = restrict(
        [(call, Rows(rows.sample, rows.live)) for call, rows in selections], of_sources
    )
    run_targets = restrict(
        [(call, Rows(rows.sample, rows.token)) for call, rows in selections], of_targets
    )

    def f(x: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        # An earlier call may have raised between the two runs.
        live.clear()
        run_sources(x)
        return run_targets(targets)

    return f


def full_sequence(call: BlockCall, rows: Rows) -> RowFunction:
    """Return the block as a function of the rows (or their sources) within full sequences; no two rows of one sample."""
    at = rows.on(call.x.device)

    def f(x: Float[Tensor, "R d"]) -> Float[Tensor, "R d"]:
        X = call.x.index_put((at.sample, at.live), x)
        return rows.select(call(X))

    return f


def linearize_rows(f: RowFunction, x: Tensor) -> Linearization:
    """Linearize a restricted block, its linear layers through `FrozenLinear`.

    Raises:
        NotSliceable: if the block's code raises on sequences of length one.
    """
    with evaluating_rows(), Roundings() as roundings:
        block = linearize(f, x)
    return replace(block, rounded=roundings.seen)


@contextmanager
def evaluating_rows() -> Iterator[None]:
    """Run a restricted block, its linear layers through `FrozenLinear`.

    Raises:
        NotSliceable: if the block's code raises on sequences of length one.
    """
    # Attention as plain products: the fused kernels have no vmap rule.
    with slicing_errors(), sdpa_kernel(SDPBackend.MATH), FrozenLinear():
        yield


def linearize_full_sequence(call: BlockCall, rows: Rows) -> Linearization:
    """Linearize a block at rows within their full sequences, no two of one sample.

    Raises:
        UsageError: if the block's code raises when it runs again.
    """
    with evaluating_full_sequence(call), Roundings() as roundings:
        block = linearize(full_sequence(call, rows), rows.select_sources(call.x))
    return replace(block, rounded=roundings.seen)


@contextmanager
def evaluating_full_sequence(call: BlockCall) -> Iterator[None]:
    """Run a block in its full sequences.

    Raises:
        UsageError: if the block's code raises when it runs again.
    """
    with replay_errors(call), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def slicing_errors() -> Iterator[None]:
    """Raise NotSliceable for what a block's code raises on sequences of length one."""
    try:
        yield
    except (NotSliceable, UsageError):
        raise
    except FAILURES as error:
        raise_device_errors(error)
        raise NotSliceable(f"the block does not run on single rows ({_format(error)})") from error


@contextmanager
def replay_errors(call: BlockCall) -> Iterator[None]:
    """Raise UsageError, naming the block, for what its code raises when it runs outside its model.

    Raises:
        BlocksNotFound: with the original exception as its cause.
    """
    try:
        yield
    except (NotSliceable, UsageError):
        raise
    except FAILURES as error:
        raise_device_errors(error)
        finding = (
            f"block {call.layer} ({call.name}) runs in the model's forward pass but can't be run again on what the model gave "
            f"it, with gradients ({_format(error)}), so its Jacobian can't be measured"
        )
        remedy = "Change what fails in its code, or name other blocks."
        raise BlocksNotFound(finding, chained(call.replica.description), remedy) from error


def _format(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
