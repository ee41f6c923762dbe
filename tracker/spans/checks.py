"""Check that the state at each boundary is the whole state: the rest of the pass depends on earlier values through it alone.

For span l, add noise to the values that the first state is computed from and to every state before span l, and set the start
of span l to its recorded value: its end must come out as recorded. With the end of the last span set to its recorded value, a
tensor that the model returns must come out as recorded, one that changes if noise is added there. The check fails if the model
keeps another tensor in addition to the state (a copy, a normed or an earlier state), or if the boundary is at the wrong place,
such as the input of attention after its norm. Inputs that do not enter the first state (masks, positions) and weights are
constants.

Fixed tensors (`Blocks.fixed`) are set to their recorded values in these passes, so that the rest may depend on them, too. A
fixed tensor that is the state at a boundary is set there instead of noise. Any other must come out as recorded with noise
added to every state.

Cost: one forward pass up to the end of every span and two whole ones, small beside the d vector-Jacobian products that each
span takes later.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn

from tracker.common.errors import UsageError
from tracker.linalg.precision import TOLERANCE, relative_error
from tracker.linalg.transfer import SEED
from tracker.model.boundaries import Boundary, as_python
from tracker.model.hidden_state import floating_tensors, hidden_state
from tracker.model.proposals import BlocksNotFound, Proposal, in_spans
from tracker.model.replica import STATELESS, ModuleState, Replica, irreproducible, require_stateless
from tracker.spans.calls import (
    BoundaryHook,
    InputDependents,
    SpanCall,
    hold,
    replace_with,
    run,
    stop_at,
)

NOISE = 0.5  # of the root mean square of what it is added to
NOT_REPRODUCED = "the forward pass does not reproduce its own states"


def check_stateless(
    replica: Replica, arguments: BoundArguments, calls: Sequence[SpanCall], before: ModuleState
) -> None:
    """Check that later passes do not read what the recorded pass left in the modules' attributes: by their last states.

    Args:
        replica: the replica that was recorded.
        arguments: of its forward.
        calls: the recorded spans.
        before: the modules' attributes before the recorded pass.
    """
    noisy = _Noise().added(calls[0].x.to(replica.device))
    hooks = {calls[0].span[0]: replace_with(replica.oriented(noisy)), calls[-1].span[1]: stop_at}
    again = partial(run, replica, arguments, calls[0].seed, hooks)
    require_stateless(replica.module, before, again, NOT_REPRODUCED, replica.description)


class _Noise:
    """Seeded Gaussian noise, drawn on the CPU in float64, so that it does not depend on device and dtype."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)

    def added(self, x: Tensor) -> Tensor:
        """Return x with noise added."""
        drawn = torch.randn(x.shape, generator=self.generator, dtype=torch.float64).to(
            x.device, x.dtype
        )
        return x + NOISE * x.square().mean().sqrt() * drawn


class WholeStateCheck:
    """The recorded pass, and the errors of passes with noise before one boundary. The replica holds its weights.

    Args:
        replica: the replica that was recorded.
        arguments: of its forward.
        calls: the recorded spans.
        fixed: the recorded values of fixed tensors.
        output: what the model returned in the recorded pass.
    """

    def __init__(
        self,
        replica: Replica,
        arguments: BoundArguments,
        calls: Sequence[SpanCall],
        fixed: Mapping[Boundary, Tensor],
        output: Any,
    ) -> None:
        self.replica, self.dtype, self.device = replica, replica.dtype, replica.device
        self.arguments, self.calls, self.output, self.seed = arguments, calls, output, calls[0].seed
        self.add_noise = _Noise().added
        self.first, self.fixed = calls[0].span[0], fixed
        self.held: dict[Boundary, BoundaryHook] = {
            place: hold(value) for place, value in fixed.items()
        }
        self.sources = self._sources()

    def check(self) -> None:
        """Check the states at all boundaries, and the fixed tensors.

        Raises:
            UsageError: if a state is not the whole state, or a fixed tensor depends on a state; also for a forward pass that is
                random or keeps state.
        """
        self.require_constant()
        for l in range(len(self.calls) + 1):
            error = self.error(l)
            if error <= TOLERANCE[self.dtype]:
                continue
            # A pass that differs from the recorded one without noise, or in NaN, says nothing of the boundary.
            if not self.error(l, noise=False) <= TOLERANCE[self.dtype]:
                raise irreproducible(NOT_REPRODUCED, self.replica.description)
            raise self.failure(l, error)

    def error(self, l: int, noise: bool = True) -> float:
        """Return the relative error of the end of span l (0-based), or of the model's output for l = L, when only the start
        of the span and fixed tensors are as recorded. Without noise, the error shows whether the pass reproduces itself.
        """
        before: dict[Boundary, BoundaryHook] = {}
        if noise:
            before = {
                self.boundary(k): self.add_noise for k in range(l) if not self._is_fixed(k)
            } | self.held
        return self._error(l, before, noise)

    def _error(self, l: int, before: Mapping[Boundary, BoundaryHook], noisy_inputs: bool) -> float:
        after, call = l == len(self.calls), self.calls[min(l, len(self.calls) - 1)]
        hooks = {**before, self.boundary(l): self._recorded(l)}
        if not after:
            hooks[call.span[1]] = stop_at
        output = (
            self._run_with_noise(hooks)
            if noisy_inputs
            else run(self.replica, self.arguments, self.seed, hooks)
        )
        if after:
            outputs, recorded = self._outputs(output), self._outputs(self.output)
            return min(
                _relative_difference(outputs[i], recorded[i]) for i in self._compared_outputs
            )
        y = self.replica.oriented(output)
        # What the span adds is often much smaller than the state that it is added to.
        x, recorded = call.x.to(self.device), call.y.to(self.device)
        return (
            float(relative_error(y - x, recorded - x, recorded, self.dtype))
            if y.shape == x.shape
            else float("inf")
        )

    @cached_property
    def _compared_outputs(self) -> list[int]:
        """The floating outputs that depend on the end of the last span, without that state itself if there are others.

        The error of one of them suffices: others may depend on earlier states, too.

        Raises:
            UsageError: if there are none.
        """
        end, state = self.boundary(len(self.calls)), self.calls[-1].y.to(self.device)
        changed = self._outputs(
            run(self.replica, self.arguments, self.seed, {**self.held, end: self.add_noise})
        )
        recorded = self._outputs(self.output)
        dependent = [
            i
            for i, (a, b) in enumerate(zip(changed, recorded, strict=True))
            if not _relative_difference(a, b) <= TOLERANCE[self.dtype]
        ]
        if not dependent:
            raise UsageError(
                f"nothing that the model returns depends on the end of the last span (the {end}), so it can't be checked that "
                "this is the whole hidden state; name boundaries that lead to the model's output, or measure a model that "
                "returns what it computes from them"
            )
        return [i for i in dependent if not torch.equal(recorded[i], state)] or dependent

    @staticmethod
    def _outputs(output: Any) -> list[Tensor]:
        if tensors := floating_tensors(output):
            return tensors
        raise UsageError(
            f"the model returns a {type(output).__name__} without a floating tensor, so that its last hidden state is the "
            "whole state can't be checked; measure a model, or a part of it, that returns what it computes"
        )

    def require_constant(self) -> None:
        """Check that fixed tensors, other than the states at boundaries, do not depend on a state.

        Raises:
            UsageError: if one does.
        """
        states = {boundary for call in self.calls for boundary in call.span}
        captured: dict[Boundary, Tensor] = {}
        hooks: dict[Boundary, BoundaryHook] = {call.span[0]: self.add_noise for call in self.calls}
        for place in self.fixed.keys() - states:
            hooks[place] = lambda value, place=place: captured.__setitem__(place, value.clone())
        if hooks.keys() <= states:
            return
        run(self.replica, self.arguments, self.seed, hooks)
        pairs = {
            place: (value.to(self.dtype), self.fixed[place].to(value.device, self.dtype))
            for place, value in captured.items()
        }
        changed = [
            place for place, (a, b) in pairs.items() if not _relative_difference(a, b) <= STATELESS
        ]
        if changed:
            raise UsageError(
                f"the {changed[0]} depends on the hidden state, so it does not stay fixed when a block is linearized; a fixed "
                "tensor is computed from the inputs without passing through a block, or is the hidden state at a boundary: "
                f"{', '.join(map(str, dict.fromkeys(b for call in self.calls for b in call.span)))}"
            )

    def _is_fixed(self, l: int) -> bool:
        """Whether the state at boundary l is fixed, by the name of the start of a span or of the end of the one before."""
        ends = {self.calls[l - 1].span[1]} if l else set()
        return not self.fixed.keys().isdisjoint({self.boundary(l)} | ends)

    def _recorded(self, l: int) -> BoundaryHook:
        """Return the hook that sets boundary l to its recorded state."""
        call = self.calls[min(l, len(self.calls) - 1)]
        state = call.y if l == len(self.calls) else call.x
        return replace_with(self.replica.oriented(state.to(self.device)))

    def boundary(self, l: int) -> Boundary:
        """Return the start of span l, or the end of the last span for l = L."""
        return self.calls[l].span[0] if l < len(self.calls) else self.calls[-1].span[1]

    def _run_with_noise(self, hooks: dict[Boundary, BoundaryHook]) -> Any:
        """Run with noise on the values that the first state is computed from."""
        with InputDependents(
            lambda i, value: self.add_noise(value) if i in self.sources else value
        ) as dependents:
            hooks[self.first] = dependents.ending_with(hooks[self.first])
            return run(self.replica, dependents.follow_inputs(self.arguments), self.seed, hooks)

    def _sources(self) -> set[int]:
        """Return the numbers of the values (`InputDependents`) that the first state is computed from."""
        added: list[Tensor] = []

        def add(i: int, value: Tensor) -> Tensor:
            # Zeros to differentiate by: their gradients show which values the state is computed from.
            added.append(
                torch.zeros_like(value, memory_format=torch.contiguous_format).requires_grad_()
            )
            return value + added[-1]

        with torch.enable_grad():
            with InputDependents(add) as dependents:
                hooks = {**self.held, self.first: dependents.ending_with(stop_at)}
                state = run(
                    self.replica, dependents.follow_inputs(self.arguments), self.seed, hooks
                )
            if not state.requires_grad:
                return set()
            gradients = torch.autograd.grad(state, added, torch.ones_like(state), allow_unused=True)
        return {i for i, gradient in enumerate(gradients) if gradient is not None}

    def failure(self, l: int, error: float) -> UsageError:
        """Return the error for a state that is not the whole state. It names what the rest depends on, too, and proposes to
        declare it as fixed, unless the boundary itself is at the wrong place.
        """
        here, after = self.boundary(l), l == len(self.calls)
        where = (
            f"the end of the last span (the {here})"
            if after
            else f"the start of span {l + 1} (the {here})"
        )
        norm = _norm_that_returns(self.replica, self.arguments, self.seed, here)
        source = "" if l or norm else self._source_of_first_span()
        states = self._states_beside(l)
        beside = [*states, *self._inputs_beside(l)]
        fixed = [*self.replica.description.fixed, *beside]
        named = repr(str(fixed[0]) if len(fixed) == 1 else [*map(str, fixed)])
        if norm:
            remedy = f"it is the output of {norm}: if residuals add to the input of {norm}, name 'input of {norm}'"
        else:
            remedy = (
                "name the tensor that residuals add to: in a pre-norm model the input of the norm before a branch, not its "
                "output, or the output of the previous module"
            )
            if beside:
                remedy += f"; if the model mixes the other tensor in between blocks, declare it: fixed={named}"
        finding = (
            f"{where} is not the whole hidden state: with that tensor as recorded and other states before it, "
            f"{'the output of the model' if after else 'the end of the span'} changes by {error:.1e} of its size, so it "
            f"also depends on {' and '.join(map(str, beside)) or 'another tensor'}; {remedy}"
        )
        description = self.replica.description
        if source:
            start = Boundary("output", source)
            spans = [(start, description.spans[0][1]), *description.spans[1:]]
            return BlocksNotFound(finding, [in_spans(description, spans)])
        # The residual around a wrong boundary comes from the state before it.
        if not beside or norm or (l and self.boundary(l - 1) in states):
            return UsageError(finding)
        line = Proposal(
            f"find_blocks(model, {as_python(description.spans)}, fixed={named})",
            description.between_boundaries(description.spans, fixed),
            f"{description.names[0]}, fixed={named}",
            f"{len(self.calls)} spans; the tensors at these places stay as they are",
        )
        return BlocksNotFound(finding, [line])

    def _source_of_first_span(self) -> str:
        """Return the module that returns the first state, if only the first span depends on what else is computed from it; ''
        if there is none. What later spans depend on, too, is no part of the first one.
        """
        for l in range(1, len(self.calls) + 1):
            if self._depends(
                l, {self.boundary(k): self._recorded(k) for k in range(l)} | self.held, True
            ):
                return ""
        state = self.replica.oriented(self.calls[0].x.to(self.device))
        returned = self._outputs_before_first_state()
        return next(
            (place.module for place, value in returned.items() if torch.equal(value, state)), ""
        )

    def _states_beside(self, l: int) -> list[Boundary]:
        """Return the boundaries before l whose states the end of span l depends on, also if all later ones are as recorded."""
        states = []
        for k in range(l):
            before = {self.boundary(j): self._recorded(j) for j in range(l)} | self.held
            if not self._is_fixed(k) and self._depends(
                l, before | {self.boundary(k): self.add_noise}, False
            ):
                states.append(self.boundary(k))
        return states

    def _inputs_beside(self, l: int) -> list[Boundary]:
        """Return the earliest outputs of modules through which the end of span l depends on the inputs, if all states before
        it are as recorded; empty also if there are none.
        """
        before = {self.boundary(k): self._recorded(k) for k in range(l)} | self.held
        if not self._depends(l, before, True):
            return []
        kept, held = self._outputs_before_first_state(), dict(self.held)

        def depends(places: Sequence[Boundary]) -> bool:
            self.held = held | {place: hold(kept[place]) for place in places}
            self.sources = self._sources()
            return self._depends(l, before | self.held, True)

        places = list(kept)
        if depends(places):
            return []
        for place in reversed(places):
            without = [other for other in places if other != place]
            places = places if depends(without) else without
        return places

    def _depends(self, l: int, before: Mapping[Boundary, BoundaryHook], noisy_inputs: bool) -> bool:
        return not self._error(l, before, noisy_inputs) <= TOLERANCE[self.dtype]

    def _outputs_before_first_state(self) -> dict[Boundary, Tensor]:
        """Return the tensors that modules return before the first state, in order; without modules that run several times."""
        returned: dict[Boundary, list[Tensor]] = {}

        def keep(place: Boundary, module: nn.Module, args: tuple, output: Any) -> None:
            value = hidden_state(output)
            if isinstance(value, Tensor) and value.is_floating_point():
                returned.setdefault(place, []).append(value.clone())

        with ExitStack() as stack:
            for name, module in self.replica.module.named_modules():
                if name:
                    hook = partial(keep, Boundary("output", name))
                    stack.callback(module.register_forward_hook(hook).remove)
            run(self.replica, self.arguments, self.seed, {self.first: stop_at})
        return {
            place: values[0]
            for place, values in returned.items()
            if len(values) == 1 and place != self.first
        }


def _relative_difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    finite = b.isfinite()  # logits may be masked
    difference, size = (
        float(torch.linalg.vector_norm(t[finite], dtype=torch.float64))
        for t in (torch.where(a == b, 0, a - b), b)
    )
    return difference / size if difference else 0.0


def _norm_that_returns(
    replica: Replica, arguments: BoundArguments, seed: int, boundary: Boundary
) -> str:
    """Return the name of the norm whose output is the tensor at the boundary, or '' if there is none."""
    returned: list[tuple[str, Any]] = []

    def keep(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        returned.append((name, output))

    with ExitStack() as stack:
        for name, module in replica.module.named_modules():
            if "norm" in type(module).__name__.lower():
                stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        state = run(replica, arguments, seed, {boundary: stop_at})
    return next((name for name, output in returned if output is state), "")
