"""What has been proved of a block holds for one way of calling it, and is proved once."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tracker.capture.recording import BlockCall
from tracker.errors import UsageError
from tracker.jacobians.batch_mixing import find_mixing
from tracker.jacobians.checks import adjoint_error, check_key, derivative_error, reproduces_recorded_output
from tracker.jacobians.restriction import RowAttention
from tracker.jacobians.slicing import Rows
from tracker.linalg.jacobian import LinearOperator


class CheckCache:
    """Proofs of recorded blocks, remembered by block and way of calling it."""

    def __init__(self, recorded_dtype: torch.dtype) -> None:
        self.recorded_dtype = recorded_dtype
        self._derivative_errors: dict[Any, float] = {}
        self._adjoint_errors: dict[Any, float] = {}
        self._same_again: dict[Any, bool] = {}
        self._unmixed: set[Any] = set()

    def derivative_error(self, path: str, row_attention: RowAttention, call: BlockCall, rows: Rows) -> float:
        """`proof.derivative_error` of a path."""
        kind = (path, rows.source is None, *check_key(call))
        if kind not in self._derivative_errors:
            self._derivative_errors[kind] = derivative_error(call, rows, row_attention)
        return self._derivative_errors[kind]

    def with_adjoint_check(
        self, operator: LinearOperator, path: str, call: BlockCall, rows: Rows, x: Tensor, allowed_error: float
    ) -> LinearOperator:
        """The same operator, at x, which proves before its first product J V that it has one.

        Raises:
            UsageError: from `apply`, if the block's derivative has no derivative, or another than it should have.
        """
        kind = (path, rows.source is None, *check_key(call))

        def refusal(why: Any) -> UsageError:
            return UsageError(
                f"the derivative of block {call.layer} ({call.name}) can't be differentiated in turn ({why}), which products "
                "J V need; choose svd='full', with a memory_budget that holds one row's Jacobians of all blocks"
            )

        def apply(V: Tensor) -> Tensor:
            if kind not in self._adjoint_errors:
                try:
                    self._adjoint_errors[kind] = adjoint_error(operator, x)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    raise refusal(error) from error
            if not self._adjoint_errors[kind] <= allowed_error:
                raise refusal(f"u . J v and J^T u . v differ by {self._adjoint_errors[kind]:.1e}")
            return operator.apply(V)

        return replace(operator, apply=apply)

    def reproduces_recorded_output(self, call: BlockCall) -> bool:
        """`proof.reproduces_recorded_output`."""
        kind = check_key(call)
        if kind not in self._same_again:
            self._same_again[kind] = reproduces_recorded_output(call, self.recorded_dtype)
        return self._same_again[kind]

    def require_independent_samples(self, call: BlockCall, rows: Rows) -> None:
        """That the samples of a batch are independent.

        Raises:
            UsageError: if the block mixes them.
        """
        layer, _, *way = check_key(call)  # in any dtype
        if len(call.x) == 1 or (layer, *way) in self._unmixed:
            return
        if found := find_mixing(call, rows):
            raise UsageError(
                f"block {call.layer} ({call.name}) mixes the samples of a batch: {found}. Its Jacobians would depend on what "
                "else is in the batch; give the samples one at a time"
            )
        self._unmixed.add((layer, *way))
