"""One forward pass recorded as replayable calls of spans (`spans`), each proved to begin with the whole state."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.boundaries import Boundary
from tracker.capture.module_state import ModuleState
from tracker.capture.recording import Recording
from tracker.capture.replica import Replica
from tracker.capture.span_checks import check_stateless, check_whole_state
from tracker.capture.spans import SpanCall, run
from tracker.capture.spill import Spill
from tracker.errors import UsageError


def record_spans(
    replica: Replica, arguments: Sequence[Any], keywords: Mapping[str, Any], memory: int = 1 << 30
) -> Recording:
    """Run the model and keep the states at every boundary, beyond `memory` bytes in files. Call inside `preserve_global_state`.

    Raises:
        UsageError: if a boundary was not reached, or more than once; if a span begins elsewhere than the one before ended,
            or does not keep the shape; if a state is not all that the rest of the pass depends on.
        FloatingPointError: if a state is not finite.
    """
    arguments, keywords = replica.own((list(arguments), dict(keywords)))
    bound = inspect.signature(replica.module.forward).bind(*arguments, **keywords)
    recorder = _Recorder(replica, Spill(memory))
    before = ModuleState(replica.module)
    with replica.materialize(replica.module):
        replica.begin_call()
        output = recorder.run(bound)
        replica.end_call(replica.module)
        calls = recorder.calls(bound)
        if before.changed():
            check_stateless(replica, bound, calls, before)
        check_whole_state(replica, bound, calls, output)
    if recorder.normed is None:
        return Recording(list(calls), None, None)
    name, module, normed = recorder.normed
    return Recording(list(calls), (name, module), normed)


class _Recorder:
    def __init__(self, replica: Replica, spill: Spill) -> None:
        self.replica = replica
        self.spill = spill
        self.spans = replica.description.spans
        self.met: dict[Boundary, Tensor] = {}
        self.normed: tuple[str, nn.Module, Tensor] | None = None

    def run(self, arguments: inspect.BoundArguments) -> Any:
        """Run once; returns what the model does."""
        boundaries = dict.fromkeys(boundary for span in self.spans for boundary in span)
        with ExitStack() as stack:
            for name in self.replica.description.final_norms:
                norm = self.replica.module.get_submodule(name)
                stack.callback(norm.register_forward_hook(partial(self.norm, name)).remove)
            return run(self.replica, arguments, {b: partial(self.meet, b) for b in boundaries})

    def meet(self, boundary: Boundary, state: Tensor) -> None:
        """Keep the state at a boundary."""
        if state.dim() != 3 or not state.is_floating_point():
            kind = str(state.dtype).removeprefix("torch.")
            raise UsageError(
                f"the {boundary} is {kind} {tuple(state.shape)}; a boundary is where the hidden state (batch, tokens, width) "
                "is given or returned"
            )
        if boundary in self.met:
            raise UsageError(
                f"the {boundary} is met twice in the forward pass; name boundaries that are met once, in order of depth"
            )
        if not torch.isfinite(state).all():
            raise FloatingPointError(
                f"the {boundary} has values that are not finite (overflow or NaN in {self.replica.dtype}); check the "
                "weights, or measure in float64"
            )
        self.met[boundary] = self.spill.keep(self.oriented(state).clone())

    def norm(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Keep the first norm that is handed the last state."""
        last, given = self.met.get(self.spans[-1][1]), args[0] if args else None
        if last is None or self.normed is not None or not isinstance(given, Tensor) or given.dim() != 3:
            return
        if _same(self.oriented(given), last):
            if not torch.isfinite(output).all():
                raise FloatingPointError(
                    f"the final norm ({name}) gives values that are not finite; measure in float64"
                )
            self.normed = (name, module, self.oriented(output))

    def oriented(self, state: Tensor) -> Tensor:
        """(B, n, d)."""
        return state if self.replica.description.batch_first else state.transpose(0, 1)

    def calls(self, arguments: inspect.BoundArguments) -> list[SpanCall]:
        """The spans, in the order in which they were named."""
        boundaries = [boundary for span in self.spans for boundary in span]
        missed = [str(boundary) for boundary in dict.fromkeys(boundaries) if boundary not in self.met]
        if missed:
            raise UsageError(f"the forward pass never reached {len(missed)} of the boundaries: {', '.join(missed)}")
        order = [list(self.met).index(boundary) for boundary in boundaries]
        if order != sorted(order) or any(start == end for start, end in self.spans):
            raise UsageError(
                f"the boundaries are not in order of depth; the forward pass meets them so: {', '.join(map(str, self.met))}"
            )
        calls: list[SpanCall] = []
        for i, (span, name) in enumerate(zip(self.spans, self.replica.description.names, strict=True)):
            x, y = (self.met[boundary] for boundary in span)
            if calls and not _same(x, calls[-1].y):
                raise UsageError(
                    f"the {span[0]} is not the hidden state that the span before ends with (the {self.spans[i - 1][1]}); "
                    "name spans each of which begins with the tensor that the one before ends with"
                )
            if x.shape != y.shape:
                raise UsageError(
                    f"the span from {name} maps {tuple(x.shape)} to {tuple(y.shape)}; a residual block keeps the shape"
                )
            x = calls[-1].y if calls else x
            model, batch_first = self.replica.module, self.replica.description.batch_first
            calls.append(SpanCall(i + 1, name, model, arguments, "", batch_first, self.replica, x, span=span))
            calls[-1].y = y
        return calls


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b.to(a.device))
