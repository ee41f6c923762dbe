"""Proof that the state at a boundary is the whole state: that the pass depends on what came before through it alone.

For every span: with noise on what the first state was computed from and on every state before this one, and with this
span's start as recorded, the end must come out as recorded. With the last end as recorded: something that the model
returns must. A tensor that is kept beside the state (a copy, a normed one, an earlier state) fails this, and so does a
state at the wrong place, such as the input of attention after its norm. Inputs that do not enter the first state (masks,
positions) are constants, as are weights.

Cost: a forward pass up to the end of every span; each takes d vector-Jacobian products later.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from functools import partial
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tracker.blocks.boundaries import Boundary
from tracker.capture.module_state import STATELESS, ModuleState
from tracker.capture.replica import Replica
from tracker.capture.spans import SpanCall, Visit, put, run, stop
from tracker.errors import UsageError
from tracker.linalg.comparison import TOLERANCE, relative_error

NOISE = 0.5  # of the root mean square of what it is added to
NOT_REPRODUCED = (
    "the forward pass does not reproduce its own states: it is random or keeps state between calls, so it has no Jacobian "
    "to measure"
)


def check_whole_state(replica: Replica, arguments: BoundArguments, calls: Sequence[SpanCall], output: Any) -> None:
    """Of the states at all boundaries. The replica has its weights.

    Args:
        output: what the model returned in the recorded pass.

    Raises:
        UsageError: if one is not the whole state; also for a forward pass that is random or keeps state.
    """
    proof, dtype = _Proof(replica, arguments, calls, output), replica.dtype
    for l in range(len(calls) + 1):
        error = proof.error(l)
        if error <= TOLERANCE[dtype]:
            continue
        if not proof.error(l, noise=False) <= TOLERANCE[dtype]:
            raise UsageError(NOT_REPRODUCED)
        raise UsageError(proof.failure(l, error))


def check_stateless(
    replica: Replica, arguments: BoundArguments, calls: Sequence[SpanCall], before: ModuleState
) -> None:
    """See that the recorded pass left nothing in the modules that later ones read, by two passes on another first state.

    Args:
        before: what the modules held before the recorded pass.

    Raises:
        UsageError: if one after it gives another last state than one before it; also for a pass that is random.
    """
    noisy = _Noise().added(calls[0].x.to(replica.device))
    visits = {calls[0].span[0]: put(noisy, calls[0].batch_first), calls[-1].span[1]: stop}
    after = ModuleState(replica.module)
    seen = run(replica, arguments, visits)
    before.restore()
    expected = run(replica, arguments, visits)
    after.restore()
    if not _relative_difference(seen, expected) <= STATELESS:
        raise UsageError(NOT_REPRODUCED)


class _Noise:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def added(self, x: Tensor) -> Tensor:
        """With Gaussian noise; drawn on the CPU in float64, so that it does not depend on device and dtype."""
        drawn = torch.randn(x.shape, generator=self.generator, dtype=torch.float64).to(x.device, x.dtype)
        return x + NOISE * x.square().mean().sqrt() * drawn


class _Proof:
    def __init__(self, replica: Replica, arguments: BoundArguments, calls: Sequence[SpanCall], output: Any) -> None:
        self.replica, self.dtype, self.device = replica, replica.dtype, replica.device
        self.arguments, self.calls, self.output = arguments, calls, output
        self.disturbed = _Noise().added
        self.first = calls[0].span[0]
        self.sources = self._sources()

    def error(self, l: int, noise: bool = True) -> float:
        """Relative error of the end of span l (0-based), or of what the model returns after the last, where only the start
        of the span is as recorded; with no noise it shows whether the pass repeats itself.
        """
        after, call = l == len(self.calls), self.calls[min(l, len(self.calls) - 1)]
        visits: dict[Boundary, Visit] = {}
        if noise:
            visits |= {before.span[0]: self.disturbed for before in self.calls[:l]}
        visits[self.boundary(l)] = put((call.y if after else call.x).to(self.device), call.batch_first)
        if not after:
            visits[call.span[1]] = stop
        found = self._run_with_sources(visits) if noise else run(self.replica, self.arguments, visits)
        if after:
            return _error_of_outputs(found, self.output)
        y = found if call.batch_first else found.transpose(0, 1)
        x, recorded = call.x.to(self.device), call.y.to(self.device)
        return relative_error(y - x, recorded - x, recorded, self.dtype) if y.shape == x.shape else float("inf")

    def boundary(self, l: int) -> Boundary:
        """Where span l begins, or the last ends."""
        return self.calls[l].span[0] if l < len(self.calls) else self.calls[-1].span[1]

    def _run_with_sources(self, visits: dict[Boundary, Visit]) -> Any:
        """Run with noise on what the first state is computed from."""
        with _Inputs(lambda i, value: self.disturbed(value) if i in self.sources else value) as inputs:
            visits[self.first] = inputs.until(visits[self.first])
            return run(self.replica, inputs.entered(self.arguments), visits)

    def _sources(self) -> set[int]:
        """The numbers of the values (`_Inputs`) that the first state is computed from."""
        added: list[Tensor] = []

        def add(i: int, value: Tensor) -> Tensor:
            added.append(torch.zeros_like(value, memory_format=torch.contiguous_format).requires_grad_())
            return value + added[-1]

        with torch.enable_grad():
            with _Inputs(add) as inputs:
                state = run(self.replica, inputs.entered(self.arguments), {self.first: inputs.until(stop)})
            if not state.requires_grad:
                return set()
            gradients = torch.autograd.grad(state, added, torch.ones_like(state), allow_unused=True)
        return {i for i, gradient in enumerate(gradients) if gradient is not None}

    def failure(self, l: int, error: float) -> str:
        """What to say of a state that is not whole."""
        here, after = self.boundary(l), l == len(self.calls)
        where = f"the end of the last span (the {here})" if after else f"the start of span {l + 1} (the {here})"
        norm = _norm_that_returns(self.replica, self.arguments, here)
        remedy = (
            f"it is what {norm} returns: where residuals add to what that is given, name 'input of {norm}'"
            if norm
            else "name the tensor that residuals add to: in a pre-norm model the input of the norm before a branch, not its "
            "output, or what the module before returns"
        )
        return (
            f"{where} is not the whole hidden state: with that tensor as recorded and other states before it, "
            f"{'what the model returns' if after else 'the end of the span'} changes by {error:.1e} of its size, so "
            f"something reaches it by another way; {remedy}"
        )


class _Inputs(TorchFunctionMode):
    """Follows the forward's inputs through operations, up to a boundary, and lets floating values on the way be changed:
    floating inputs, and results of operations on inputs or such results. `change` takes the value's number and the value.
    """

    def __init__(self, change: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.count = 0
        self.done = False
        self.followed: dict[int, Tensor] = {}  # by identity

    def entered(self, arguments: BoundArguments) -> BoundArguments:
        """The inputs themselves."""
        return BoundArguments(arguments.signature, OrderedDict(tree_map(self.follow, dict(arguments.arguments))))

    def until(self, visit: Visit) -> Visit:
        """A visit that ends the following."""

        def last(found: Tensor) -> Tensor | None:
            self.done = True
            return visit(found)

        return last

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        output = function(*arguments, **(keywords or {}))
        given = [value for value in tree_leaves((arguments, keywords)) if isinstance(value, Tensor)]
        if self.done or not any(id(value) in self.followed for value in given):
            return output
        if any(value is output for value in given):  # in place
            self.followed[id(output)] = output
            return output
        return tree_map(self.follow, output) if isinstance(output, (Tensor, tuple, list)) else output

    def follow(self, value: Any) -> Any:
        """A value that depends on the inputs, changed."""
        if isinstance(value, Tensor):
            if value.is_floating_point():
                value, self.count = self.change(self.count, value), self.count + 1
            self.followed[id(value)] = value
        return value


def _error_of_outputs(output: Any, recorded: Any) -> float:
    """The relative error of the floating output that is reproduced best: some may be read off earlier states."""
    pairs = list(zip(_floating(output), _floating(recorded), strict=True))
    if not pairs:
        raise UsageError(
            f"the model returns a {type(recorded).__name__} without a floating tensor, so its last hidden state can't be "
            "shown to be the whole state; measure a model, or a part of it, that returns what it computes"
        )
    return min(_relative_difference(a, b) for a, b in pairs)


def _relative_difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    there = b.isfinite()  # logits may be masked
    difference, size = (
        float(torch.linalg.vector_norm(t[there], dtype=torch.float64)) for t in (torch.where(a == b, 0, a - b), b)
    )
    return difference / size if difference else 0.0


def _floating(output: Any) -> list[Tensor]:
    leaves = tree_leaves(vars(output) if is_dataclass(output) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _norm_that_returns(replica: Replica, arguments: BoundArguments, boundary: Boundary) -> str:
    """The norm that returns the very tensor found at the boundary, or ''."""
    returned: list[tuple[str, Any]] = []

    def keep(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        returned.append((name, output))

    with ExitStack() as stack:
        for name, module in replica.module.named_modules():
            if "norm" in type(module).__name__.lower():
                stack.callback(module.register_forward_hook(partial(keep, name)).remove)
        state = run(replica, arguments, {boundary: stop})
    return next((name for name, output in returned if output is state), "")
