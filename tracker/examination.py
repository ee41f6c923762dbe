"""What has been proved of a block holds for one way of calling it, and is proved once."""

from typing import Any

import torch

from tracker.arguments import Rows
from tracker.blocks import UsageError
from tracker.mixing import mixing
from tracker.proof import derivative_error, is_same_again, kind_of
from tracker.recording import BlockCall
from tracker.restriction import Answered


class Examined:
    """Proofs of recorded blocks, remembered by block and way of calling it."""

    def __init__(self, recorded_in: torch.dtype) -> None:
        self.recorded_in = recorded_in
        self._derivative_errors: dict[Any, float] = {}
        self._same_again: dict[Any, bool] = {}
        self._unmixed: set[Any] = set()

    def derivative_error(self, path: str, answered: Answered, call: BlockCall, rows: Rows) -> float:
        """`proof.derivative_error` of a path."""
        kind = (path, rows.source is None, *kind_of(call))
        if kind not in self._derivative_errors:
            self._derivative_errors[kind] = derivative_error(call, rows, answered)
        return self._derivative_errors[kind]

    def is_same_again(self, call: BlockCall) -> bool:
        """`proof.is_same_again`."""
        kind = kind_of(call)
        if kind not in self._same_again:
            self._same_again[kind] = is_same_again(call, self.recorded_in)
        return self._same_again[kind]

    def require_unmixed(self, call: BlockCall, rows: Rows) -> None:
        """That the samples of a batch are independent.

        Raises:
            UsageError: if the block mixes them.
        """
        layer, _, *way = kind_of(call)  # in any dtype
        if len(call.x) == 1 or (layer, *way) in self._unmixed:
            return
        if found := mixing(call, rows):
            raise UsageError(
                f"block {call.layer} ({call.name}) mixes the samples of a batch: {found}. Its Jacobians would depend on what "
                "else is in the batch; give the samples one at a time"
            )
        self._unmixed.add((layer, *way))
