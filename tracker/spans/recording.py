"""Record one forward pass as calls of spans, and check that each begins with the whole hidden state."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tracker.common.errors import UsageError
from tracker.model.boundaries import Boundary
from tracker.model.head import HeadHooks
from tracker.model.hidden_state import check_finite, same_state
from tracker.model.random_numbers import seed_of
from tracker.model.recording import Recording, Spill
from tracker.model.replica import ModuleState, Replica, irreproducible
from tracker.spans.calls import SpanCall, run
from tracker.spans.checks import WholeStateCheck, check_stateless


def record_spans(
    replica: Replica, arguments: Sequence[Any], keywords: Mapping[str, Any], memory: int = 1 << 30
) -> Recording:
    """Run the model and record the state at every boundary. Call inside `preserve_global_state`.

    Args:
        replica: the copy of the model that runs.
        arguments: positional arguments of the model's forward; they are copied.
        keywords: its keyword arguments; they are copied.
        memory: bytes of recorded states to keep in memory; the others go to files.

    Raises:
        UsageError: if the pass did not reach a boundary, or reached it twice; if a span does not begin where the one before
            ended, or changes the shape; if the rest of the pass depends on more than the state at a boundary and fixed tensors.
        FloatingPointError: if a state is not finite.
    """
    recorder = _Recorder(replica, Spill(memory), seed_of(arguments, keywords))
    arguments, keywords = replica.copy_inputs((list(arguments), dict(keywords)))
    bound = inspect.signature(replica.module.forward).bind(*arguments, **keywords)
    before = ModuleState(replica.module)
    with replica.materialize(replica.module):
        with replica.watch_writes(replica.module):
            output = recorder.run(bound)
            drawn_seed = replica.generators.drawn_seed()
        calls = recorder.calls(bound)
        if before.changed():
            check_stateless(replica, bound, calls, before)
        WholeStateCheck(replica, bound, calls, recorder.fixed).check()
    return recorder.head.recording(calls, drawn_seed, output)


class _Recorder:
    """The hooks that record states at boundaries, and the states recorded so far."""

    def __init__(self, replica: Replica, spill: Spill, seed: int) -> None:
        self.replica = replica
        self.spill = spill
        self.seed = seed
        self.spans = replica.description.spans
        self.states: dict[Boundary, Tensor] = {}
        self.fixed: dict[Boundary, Tensor] = {}  # as found, not batch first
        self.head = HeadHooks(replica)
        self.random: dict[Boundary, list[bytes]] = {}  # the states of the generators

    def run(self, arguments: inspect.BoundArguments) -> Any:
        """Run the model once, with hooks at all boundaries, fixed tensors and final norms; return its output."""
        boundaries = dict.fromkeys(boundary for span in self.spans for boundary in span)
        hooks = {
            place: partial(self.record_fixed, place) for place in self.replica.description.fixed
        }
        hooks |= {boundary: partial(self.record_state, boundary) for boundary in boundaries}
        with self.head.watch(self.is_last_state):
            return run(self.replica, arguments, self.seed, hooks)

    def record_fixed(self, place: Boundary, value: Tensor) -> None:
        """Record a fixed tensor."""
        if place in self.fixed:
            raise UsageError(
                f"the forward pass reaches the {place} twice; name fixed tensors that it reaches once"
            )
        self.fixed[place] = self.spill.keep(value.clone())

    def record_state(self, boundary: Boundary, state: Tensor) -> None:
        """Record the state at a boundary."""
        if state.dim() != 3 or not state.is_floating_point():
            dtype = str(state.dtype).removeprefix("torch.")
            raise UsageError(
                f"the {boundary} is {dtype} {tuple(state.shape)}; a boundary is where the hidden state (batch, tokens, width) "
                "is given or returned"
            )
        if boundary in self.states:
            raise UsageError(
                f"the forward pass reaches the {boundary} twice; name boundaries that it reaches once, in order of depth"
            )
        check_finite(state, f"the {boundary}")
        self.random[boundary] = self.replica.generators.states()
        self.states[boundary] = self.spill.keep(self.replica.oriented(state).clone())
        if boundary in self.replica.description.fixed:
            self.record_fixed(boundary, state)
        self.head.enter_block()
        if boundary == self.spans[-1][1]:
            self.head.leave_block(state)

    def is_last_state(self, x: Tensor) -> bool:
        """Whether x (B, n, d) equals the state at the end of the last span."""
        last = self.states.get(self.spans[-1][1])
        return last is not None and same_state(x, last)

    def calls(self, arguments: inspect.BoundArguments) -> list[SpanCall]:
        """Return the recorded spans, in the order in which they were named.

        Raises:
            UsageError: for boundaries that were not reached or are out of order, and spans that do not follow each other.
        """
        boundaries = [boundary for span in self.spans for boundary in span]
        missed = [
            str(boundary) for boundary in dict.fromkeys(boundaries) if boundary not in self.states
        ]
        if missed:
            raise UsageError(
                f"the forward pass never reached {len(missed)} of the boundaries: {', '.join(missed)}"
            )
        missed = [str(place) for place in self.replica.description.fixed if place not in self.fixed]
        if missed:
            raise UsageError(
                f"the forward pass never reached {len(missed)} of the fixed tensors: {', '.join(missed)}; name where the "
                "tensors are that the model mixes in between blocks, fixed='output of NAME', NAME a module that it calls"
            )
        order = [list(self.states).index(boundary) for boundary in boundaries]
        if order != sorted(order) or any(start == end for start, end in self.spans):
            raise UsageError(
                "the boundaries are not in order of depth; the forward pass reaches them in this order: "
                f"{', '.join(map(str, self.states))}"
            )
        calls: list[SpanCall] = []
        for i, (span, name) in enumerate(
            zip(self.spans, self.replica.description.names, strict=True)
        ):
            x, y = (self.states[boundary] for boundary in span)
            if calls and not same_state(x, calls[-1].y):
                raise UsageError(
                    f"the {span[0]} is not the hidden state that the previous span ends with (the {self.spans[i - 1][1]}); "
                    "name spans that each begin with the tensor that the previous one ends with"
                )
            # Generators have moved between both ends: the span is no function of its state.
            if self.random[span[0]] != self.random[span[1]]:
                raise irreproducible(
                    f"the span from {name} draws random numbers", self.replica.description
                )
            if x.shape != y.shape:
                raise UsageError(
                    f"the span from {name} maps {tuple(x.shape)} to {tuple(y.shape)}; a residual block keeps the shape"
                )
            # One tensor in memory for the end of a span and the start of the next
            x = calls[-1].y if calls else x
            model = self.replica.module
            calls.append(
                SpanCall(
                    i + 1, name, model, arguments, "", self.replica, x, span=span, seed=self.seed
                )
            )
            calls[-1].y = y
        return calls
