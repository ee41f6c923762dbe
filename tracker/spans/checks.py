"""Check that the state at each boundary is the whole state: the rest of the pass depends on earlier values through it alone.

In one pass with gradients, the state at each boundary is a new leaf. The end of span l may have a derivative with respect to its
own start, and to no earlier start and none of the values that the first state is computed from. With respect to the end of the
last span, a tensor that the model returns must have one, and none with respect to what is before it. The check fails if the model
keeps another tensor in addition to the state (a copy, a normed or an earlier state), or if the boundary is at the wrong place,
such as the input of attention after its norm. Inputs that do not enter the first state (masks, positions), weights, and earlier
values that enter without a derivative (`detach`, `argmax`) are constants.

Fixed tensors (`Blocks.fixed`) are set to their recorded values, so that the rest may depend on them, too. A fixed tensor that is
the state at a boundary varies in the span that begins there alone. Any other must not depend on a state.

Cost: one forward pass, and a backward pass through each span, small beside the d vector-Jacobian products that each takes later.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn

from tracker.common.errors import UsageError
from tracker.linalg.jacobian import GradientsStayOn
from tracker.linalg.precision import FLOOR, TOLERANCE, relative_error
from tracker.linalg.transfer import standard_normal
from tracker.model.boundaries import Boundary, as_python
from tracker.model.hidden_state import floating_tensors, hidden_state
from tracker.model.proposals import BlocksNotFound, Proposal, in_spans
from tracker.model.random_numbers import noise_like
from tracker.model.replica import ModuleState, Replica, irreproducible, require_stateless
from tracker.spans.calls import (
    BoundaryHook,
    InputDependents,
    SpanCall,
    hold,
    replace_with,
    run,
    stop_at,
)

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
    x = calls[0].x.to(replica.device)
    noisy = replica.oriented(x + 0.5 * noise_like(x))
    hooks = {calls[0].span[0]: replace_with(noisy), calls[-1].span[1]: stop_at}
    again = partial(run, replica, arguments, calls[0].seed, hooks)
    require_stateless(replica.module, before, again, NOT_REPRODUCED, replica.description)


@dataclass
class _Dependence:
    """Derivatives of a tensor with respect to what is before a boundary, relative to that with respect to the state there."""

    states: dict[int, float]  # by boundary
    inputs: float  # to the values that the first state is computed from

    @property
    def largest(self) -> float:
        return max(self.inputs, *self.states.values(), 0.0)


class WholeStateCheck:
    """The recorded pass, and passes with gradients. The replica holds its weights.

    Args:
        replica: the replica that was recorded.
        arguments: of its forward.
        calls: the recorded spans.
        fixed: the recorded values of fixed tensors.
    """

    def __init__(
        self,
        replica: Replica,
        arguments: BoundArguments,
        calls: Sequence[SpanCall],
        fixed: Mapping[Boundary, Tensor],
    ) -> None:
        self.replica, self.dtype, self.device = replica, replica.dtype, replica.device
        self.arguments, self.calls, self.seed = arguments, calls, calls[0].seed
        self.first, self.fixed = calls[0].span[0], fixed
        self.held: dict[Boundary, BoundaryHook] = {
            place: hold(value) for place, value in fixed.items()
        }

    def check(self) -> None:
        """Check the states at all boundaries, and the fixed tensors.

        Raises:
            UsageError: if a state is not the whole state, or a fixed tensor depends on a state; also for a forward pass that is
                random or keeps state.
        """
        of_ends = self._dependences(self.held)
        for l, of_end in enumerate(of_ends):
            if not of_end.largest <= TOLERANCE[self.dtype]:
                raise self._failure(l, of_ends)

    def _dependences(self, held: Mapping[Boundary, BoundaryHook]) -> list[_Dependence]:
        """Return what the end of each span (0-based) depends on besides its start, and the model's output besides the last end.

        Args:
            held: hooks that set fixed tensors.
        """
        found: list[_Dependence] = []
        leaves: list[Tensor] = []  # the states at boundaries
        zeros: list[
            Tensor
        ] = []  # added to what depends on the inputs; then those that the first state depends on

        def add(value: Tensor) -> Tensor:
            zero = torch.zeros_like(value, memory_format=torch.contiguous_format)
            zeros.append(zero.requires_grad_())
            return value + zeros[-1]

        def end(l: int, y: Tensor) -> None:
            call = self.calls[l]
            x, recorded = call.x.to(self.device), call.y.to(self.device)
            out = self.replica.oriented(y)
            error = torch.inf
            if out.shape == x.shape:
                error = relative_error(out - x, recorded - x, recorded, self.dtype)
            # NaN says nothing of the boundary, either.
            if not error <= TOLERANCE[self.dtype]:
                if held is self.held:
                    raise irreproducible(NOT_REPRODUCED, self.replica.description)
                found.append(
                    _Dependence({}, torch.inf)
                )  # a tensor that is held changes in the pass
                return
            found.append(self._dependence(y, leaves, zeros, residual=True))

        def start(l: int, state: Tensor) -> Tensor:
            if l == 0:
                zeros[:] = [zero for zero in zeros if _depends(state, zero)]
            recorded = self.calls[l].x if l < len(self.calls) else self.calls[-1].y
            leaf = self.replica.oriented(recorded.to(self.device)).clone()
            leaves.append(leaf.requires_grad_())
            # Later code may work in place
            return leaf.clone(memory_format=torch.contiguous_format)

        def fixed(place: Boundary, hook: BoundaryHook, value: Tensor) -> Tensor | None:
            if place in self.fixed and any(_depends(value, leaf) for leaf in leaves):
                states = dict.fromkeys(boundary for call in self.calls for boundary in call.span)
                raise UsageError(
                    f"the {place} depends on the hidden state, so it does not stay fixed when a block is linearized; a fixed "
                    "tensor is computed from the inputs without passing through a block, or is the hidden state at a boundary: "
                    f"{', '.join(map(str, states))}"
                )
            return hook(value)

        hooks: dict[Boundary, BoundaryHook] = {
            place: partial(fixed, place, hook) for place, hook in held.items()
        }
        steps: dict[Boundary, list[Callable[[Tensor], Tensor | None]]] = {}
        for l, call in enumerate(self.calls):
            steps.setdefault(call.span[0], []).append(partial(start, l))
            steps.setdefault(call.span[1], []).append(partial(end, l))
        steps[self.calls[-1].span[1]].append(partial(start, len(self.calls)))
        hooks |= {place: partial(_last_of, of_place) for place, of_place in steps.items()}
        with torch.enable_grad(), GradientsStayOn(), InputDependents(add) as dependents:
            hooks[self.first] = dependents.ending_with(hooks[self.first])
            arguments = dependents.follow_inputs(self.arguments)
            output = run(self.replica, arguments, self.seed, hooks)
        return [*found, self._of_outputs(output, leaves, zeros)]

    def _dependence(
        self, y: Tensor, leaves: Sequence[Tensor], zeros: Sequence[Tensor], residual: bool = False
    ) -> _Dependence:
        """Return what a tensor depends on besides the last leaf; infinite sizes if it does not depend on that.

        Args:
            residual: whether the identity is left out of the derivative by the last leaf.
        """
        *earlier, own = leaves
        w = standard_normal(y.shape, y)
        # The modes of boundaries and inputs would replace the leaves
        with torch._C.DisableTorchFunction():
            gradients = torch.autograd.grad(
                y, [own, *earlier, *zeros], w, retain_graph=True, allow_unused=True
            )
        own_gradient, *others = gradients
        size = (
            0.0 if own_gradient is None else _size(own_gradient - w if residual else own_gradient)
        )
        size = max(size, FLOOR[self.dtype] * _size(w) * residual)
        sizes = [0.0 if g is None else _size(g) / size if size else torch.inf for g in others]
        states = {k: of for k, of in enumerate(sizes[: len(earlier)]) if not self._is_fixed(k)}
        return _Dependence(states, max(sizes[len(earlier) :], default=0.0))

    def _of_outputs(
        self, output: Any, leaves: Sequence[Tensor], zeros: Sequence[Tensor]
    ) -> _Dependence:
        """Return the dependence of the output that depends least on what is before the end of the last span.

        Of the outputs that depend on this end, one suffices: others may depend on earlier states, too. It is not the state itself
        if there are others.

        Raises:
            UsageError: if there are none.
        """
        outputs = floating_tensors(output)
        if not outputs:
            raise UsageError(
                f"the model returns a {type(output).__name__} without a floating tensor, so that its last hidden state is the "
                "whole state can't be checked; measure a model, or a part of it, that returns what it computes"
            )
        dependent = [y for y in outputs if _depends(y, leaves[-1])]
        if not dependent:
            raise UsageError(
                f"nothing that the model returns depends on the end of the last span (the {self.boundary(len(self.calls))}), so "
                "it can't be checked that this is the whole hidden state; name boundaries that lead to the model's output, or "
                "measure a model that returns what it computes from them"
            )
        others = [y for y in dependent if not torch.equal(y, leaves[-1])] or dependent
        return min((self._dependence(y, leaves, zeros) for y in others), key=lambda of: of.largest)

    def _is_fixed(self, l: int) -> bool:
        """Whether the state at boundary l is fixed, by the name of the start of a span or of the end of the one before."""
        ends = {self.calls[l - 1].span[1]} if l else set()
        return not self.fixed.keys().isdisjoint({self.boundary(l)} | ends)

    def boundary(self, l: int) -> Boundary:
        """Return the start of span l, or the end of the last span for l = L."""
        return self.calls[l].span[0] if l < len(self.calls) else self.calls[-1].span[1]

    def _failure(self, l: int, of_ends: Sequence[_Dependence]) -> UsageError:
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
        source = "" if l or norm else self._source_of_first_span(of_ends)
        states = [k for k, size in of_ends[l].states.items() if not size <= TOLERANCE[self.dtype]]
        states = list(map(self.boundary, states))
        beside = [*states, *self._inputs_beside(l, of_ends)]
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
        dependent = "the output of the model" if after else "the end of the span"
        others = " and ".join(map(str, beside)) or "another tensor"
        finding = (
            f"{where} is not the whole hidden state: beside that tensor, {dependent} also depends on {others} (relative size "
            f"{of_ends[l].largest:.1e}); {remedy}"
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

    def _source_of_first_span(self, of_ends: Sequence[_Dependence]) -> str:
        """Return the module that returns the first state, if only the first span depends on what else is computed from it; ''
        if there is none. What later spans depend on, too, is no part of the first one.
        """
        if any(not of_end.inputs <= TOLERANCE[self.dtype] for of_end in of_ends[1:]):
            return ""
        state = self.replica.oriented(self.calls[0].x.to(self.device))
        returned = self._outputs_before_first_state()
        return next(
            (place.module for place, value in returned.items() if torch.equal(value, state)), ""
        )

    def _inputs_beside(self, l: int, of_ends: Sequence[_Dependence]) -> list[Boundary]:
        """Return the earliest outputs of modules through which the end of span l depends on the inputs, if all states before
        it are as recorded; empty also if there are none.
        """
        if of_ends[l].inputs <= TOLERANCE[self.dtype]:
            return []
        kept = self._outputs_before_first_state()

        def depends(places: Sequence[Boundary]) -> bool:
            held = {place: hold(kept[place]) for place in places}
            return not self._dependences(self.held | held)[l].inputs <= TOLERANCE[self.dtype]

        places = list(kept)
        if depends(places):
            return []
        for place in reversed(places):
            without = [other for other in places if other != place]
            places = places if depends(without) else without
        return places

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


def _last_of(steps: Sequence[Callable[[Tensor], Tensor | None]], state: Tensor) -> Tensor | None:
    """Take the steps of a boundary; return what the last one does."""
    return [step(state) for step in steps][-1]


def _depends(value: Tensor, leaf: Tensor) -> bool:
    """Whether a tensor has a derivative with respect to a leaf that is not zero."""
    if not value.requires_grad:
        return False
    with torch._C.DisableTorchFunction():
        w = torch.ones_like(value)
        (gradient,) = torch.autograd.grad(value, leaf, w, retain_graph=True, allow_unused=True)
        return gradient is not None and bool(gradient.any())


def _size(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


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
