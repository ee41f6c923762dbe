"""Cache the results of checks: a block is checked once for each way of calling it (`checks.check_key`)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tracker.capture.recording import BlockCall
from tracker.device_errors import raise_device_errors
from tracker.errors import UsageError
from tracker.jacobians.batch_mixing import find_mixing
from tracker.jacobians.checks import adjoint_error, check_key, derivative_error, reproduces_recorded_output
from tracker.jacobians.independent import Comparison, Independent, settle
from tracker.jacobians.restriction import RowAttention
from tracker.jacobians.slicing import Rows
from tracker.linalg.jacobian import LinearOperator


class CheckCache:
    """Results of checks of recorded blocks, by block and way of calling it.

    Args:
        unmixed: the blocks, and ways of calling them, that are known not to mix samples; this check adds to it.
    """

    def __init__(self, recorded_dtype: torch.dtype, unmixed: set[Any] | None = None) -> None:
        self.recorded_dtype = recorded_dtype
        self._derivative_errors: dict[Any, tuple[float, Comparison | None]] = {}
        self._adjoint_errors: dict[Any, float] = {}
        self._independently: dict[Any, Independent] = {}
        self._reproduced: dict[Any, bool] = {}
        self._unmixed: set[Any] = set() if unmixed is None else unmixed

    def derivative_error(
        self, path: str, row_attention: RowAttention, call: BlockCall, rows: Rows, compared: bool
    ) -> tuple[float, Comparison | None]:
        """Return `checks.derivative_error` of a path."""
        key = (path, rows.source is None, *check_key(call))
        if key not in self._derivative_errors:
            self._derivative_errors[key] = derivative_error(call, rows, row_attention, compared)
        return self._derivative_errors[key]

    def independently(self, call: BlockCall, rows: Rows, at_rows: Comparison | None) -> Independent:
        """Return `independent.settle`; `at_rows` is None for the full sequence."""
        key = (at_rows is None, rows.source is None, *check_key(call))
        if key not in self._independently:
            self._independently[key] = settle(call, rows, at_rows)
        return self._independently[key]

    def with_adjoint_check(
        self, operator: LinearOperator, path: str, call: BlockCall, rows: Rows, x: Tensor, allowed_error: float
    ) -> LinearOperator:
        """Return the operator at x with `checks.adjoint_error` checked before its first product J V.

        Raises:
            UsageError: from `apply`, if the block's derivative has no derivative, or a wrong one.
        """
        key = (path, rows.source is None, *check_key(call))

        def refusal(why: Any) -> UsageError:
            return UsageError(
                f"the derivative of block {call.layer} ({call.name}) can't be differentiated ({why}), which products J V "
                "need; choose svd='full', with a memory_budget that holds one row's Jacobians of all blocks"
            )

        def apply(V: Tensor) -> Tensor:
            if key not in self._adjoint_errors:
                try:
                    self._adjoint_errors[key] = adjoint_error(operator, x)
                except RuntimeError as error:
                    raise_device_errors(error)
                    raise refusal(error) from error
            if not self._adjoint_errors[key] <= allowed_error:
                raise refusal(f"u . J v and J^T u . v differ by {self._adjoint_errors[key]:.1e}")
            return operator.apply(V)

        return replace(operator, apply=apply)

    def reproduces_recorded_output(self, call: BlockCall) -> bool:
        """Return `checks.reproduces_recorded_output`."""
        key = check_key(call)
        if key not in self._reproduced:
            self._reproduced[key] = reproduces_recorded_output(call, self.recorded_dtype)
        return self._reproduced[key]

    def require_independent_samples(self, call: BlockCall, rows: Rows) -> None:
        """Check that the samples of a batch are independent.

        Raises:
            UsageError: if the block mixes them.
        """
        layer, _, *arguments = check_key(call)  # independent of the dtype
        if len(call.x) == 1 or (layer, *arguments) in self._unmixed:
            return
        if found := find_mixing(call, rows):
            raise UsageError(
                f"block {call.layer} ({call.name}) mixes the samples of a batch: {found}. Its Jacobians would depend on what "
                "else is in the batch; give the samples one at a time"
            )
        self._unmixed.add((layer, *arguments))
