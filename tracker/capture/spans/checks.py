"""Check that the state at each boundary is the whole state: the rest of the pass depends on earlier values through it alone.

For span l, add noise to the values that the first state is computed from and to every state before span l, and set the start
of span l to its recorded value: its end must come out as recorded. With the end of the last span set to its recorded value, a
tensor that the model returns must come out as recorded. The check fails if the model keeps another tensor in addition to the
state (a copy, a normed or an earlier state), or if the boundary is at the wrong place, such as the input of attention after
its norm. Inputs that do not enter the first state (masks, positions) and weights are constants.

Cost: one forward pass up to the end of every span, small beside the d vector-Jacobian products that each span takes later.
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
from tracker.capture.replicas.module_state import STATELESS, ModuleState, irreproducible
from tracker.capture.replicas.replica import Replica
from tracker.capture.spans.calls import BoundaryHook, SpanCall, replace_with, run, stop_at
from tracker.errors import UsageError
from tracker.linalg.comparison import TOLERANCE, relative_error

NOISE = 0.5  # of the root mean square of what it is added to
NOT_REPRODUCED = "the forward pass does not reproduce its own states"


def check_whole_state(replica: Replica, arguments: BoundArguments, calls: Sequence[SpanCall], output: Any) -> None:
    """Check the states at all boundaries. The replica holds its weights.

    Args:
        replica: the replica that was recorded.
        arguments: of its forward.
        calls: the recorded spans.
        output: what the model returned in the recorded pass.

    Raises:
        UsageError: if a state is not the whole state; also for a forward pass that is random or keeps state.
    """
    check, dtype = _WholeStateCheck(replica, arguments, calls, output), replica.dtype
    for l in range(len(calls) + 1):
        error = check.error(l)
        if error <= TOLERANCE[dtype]:
            continue
        if not check.error(l, noise=False) <= TOLERANCE[dtype]:
            raise irreproducible(NOT_REPRODUCED)
        raise UsageError(check.failure(l, error))


def check_stateless(
    replica: Replica, arguments: BoundArguments, calls: Sequence[SpanCall], before: ModuleState
) -> None:
    """Check that later passes do not read what the recorded pass left in the modules' attributes.

    Two passes on another first state, one from the attributes after the recorded pass and one from those before it, must
    give the same last state.

    Args:
        replica: the replica that was recorded.
        arguments: of its forward.
        calls: the recorded spans.
        before: the modules' attributes before the recorded pass.

    Raises:
        UsageError: if the last states differ; also for a pass that is random.
    """
    noisy = _Noise().added(calls[0].x.to(replica.device))
    hooks = {calls[0].span[0]: replace_with(noisy, calls[0].batch_first), calls[-1].span[1]: stop_at}
    after = ModuleState(replica.module)
    found = run(replica, arguments, calls[0].seed, hooks)
    before.restore()
    expected = run(replica, arguments, calls[0].seed, hooks)
    after.restore()
    if not _relative_difference(found, expected) <= STATELESS:
        raise irreproducible(NOT_REPRODUCED)


class _Noise:
    """Seeded Gaussian noise, drawn on the CPU in float64, so that it does not depend on device and dtype."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def added(self, x: Tensor) -> Tensor:
        """Return x with noise added."""
        drawn = torch.randn(x.shape, generator=self.generator, dtype=torch.float64).to(x.device, x.dtype)
        return x + NOISE * x.square().mean().sqrt() * drawn


class _WholeStateCheck:
    """The recorded pass, and the errors of passes with noise before one boundary."""

    def __init__(self, replica: Replica, arguments: BoundArguments, calls: Sequence[SpanCall], output: Any) -> None:
        self.replica, self.dtype, self.device = replica, replica.dtype, replica.device
        self.arguments, self.calls, self.output, self.seed = arguments, calls, output, calls[0].seed
        self.add_noise = _Noise().added
        self.first = calls[0].span[0]
        self.sources = self._sources()

    def error(self, l: int, noise: bool = True) -> float:
        """Return the relative error of the end of span l (0-based), or of the model's output for l = L, when only the start
        of the span is as recorded. Without noise, the error shows whether the pass reproduces itself.
        """
        after, call = l == len(self.calls), self.calls[min(l, len(self.calls) - 1)]
        hooks: dict[Boundary, BoundaryHook] = {}
        if noise:
            hooks |= {before.span[0]: self.add_noise for before in self.calls[:l]}
        state = (call.y if after else call.x).to(self.device)
        hooks[self.boundary(l)] = replace_with(state, call.batch_first)
        if not after:
            hooks[call.span[1]] = stop_at
        found = self._run_with_noise(hooks) if noise else run(self.replica, self.arguments, self.seed, hooks)
        if after:
            return _error_of_outputs(found, self.output)
        y = found if call.batch_first else found.transpose(0, 1)
        x, recorded = call.x.to(self.device), call.y.to(self.device)
        return float(relative_error(y - x, recorded - x, recorded, self.dtype)) if y.shape == x.shape else float("inf")

    def boundary(self, l: int) -> Boundary:
        """Return the start of span l, or the end of the last span for l = L."""
        return self.calls[l].span[0] if l < len(self.calls) else self.calls[-1].span[1]

    def _run_with_noise(self, hooks: dict[Boundary, BoundaryHook]) -> Any:
        """Run with noise on the values that the first state is computed from."""
        with _InputDependents(lambda i, value: self.add_noise(value) if i in self.sources else value) as dependents:
            hooks[self.first] = dependents.ending_with(hooks[self.first])
            return run(self.replica, dependents.follow_inputs(self.arguments), self.seed, hooks)

    def _sources(self) -> set[int]:
        """Return the numbers of the values (`_InputDependents`) that the first state is computed from."""
        added: list[Tensor] = []

        def add(i: int, value: Tensor) -> Tensor:
            added.append(torch.zeros_like(value, memory_format=torch.contiguous_format).requires_grad_())
            return value + added[-1]

        with torch.enable_grad():
            with _InputDependents(add) as dependents:
                hooks = {self.first: dependents.ending_with(stop_at)}
                state = run(self.replica, dependents.follow_inputs(self.arguments), self.seed, hooks)
            if not state.requires_grad:
                return set()
            gradients = torch.autograd.grad(state, added, torch.ones_like(state), allow_unused=True)
        return {i for i, gradient in enumerate(gradients) if gradient is not None}

    def failure(self, l: int, error: float) -> str:
        """Return the message for a state that is not the whole state."""
        here, after = self.boundary(l), l == len(self.calls)
        where = f"the end of the last span (the {here})" if after else f"the start of span {l + 1} (the {here})"
        norm = _norm_that_returns(self.replica, self.arguments, self.seed, here)
        remedy = (
            f"it is the output of {norm}: if residuals add to the input of {norm}, name 'input of {norm}'"
            if norm
            else "name the tensor that residuals add to: in a pre-norm model the input of the norm before a branch, not its "
            "output, or the output of the previous module"
        )
        return (
            f"{where} is not the whole hidden state: with that tensor as recorded and other states before it, "
            f"{'the output of the model' if after else 'the end of the span'} changes by {error:.1e} of its size, so it "
            f"also depends on another tensor; {remedy}"
        )


class _InputDependents(TorchFunctionMode):
    """Number the floating values that depend on the forward's inputs, up to a boundary, and let `change(number, value)` change
    each: floating inputs, and results of operations on inputs or on such results.
    """

    def __init__(self, change: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.count = 0
        self.done = False
        self.followed: dict[int, Tensor] = {}  # by identity

    def follow_inputs(self, arguments: BoundArguments) -> BoundArguments:
        """Return the inputs, changed."""
        return BoundArguments(arguments.signature, OrderedDict(tree_map(self.follow, dict(arguments.arguments))))

    def ending_with(self, hook: BoundaryHook) -> BoundaryHook:
        """Return a hook that ends the following of values and then does what `hook` does."""

        def last(found: Tensor) -> Tensor | None:
            self.done = True
            return hook(found)

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
        """Number a value that depends on the inputs, and return it changed."""
        if isinstance(value, Tensor):
            if value.is_floating_point():
                value, self.count = self.change(self.count, value), self.count + 1
            self.followed[id(value)] = value
        return value


def _error_of_outputs(output: Any, recorded: Any) -> float:
    """Return the smallest relative error over the floating outputs: some may be computed from earlier states."""
    pairs = list(zip(_floating(output), _floating(recorded), strict=True))
    if not pairs:
        raise UsageError(
            f"the model returns a {type(recorded).__name__} without a floating tensor, so that its last hidden state is the "
            "whole state can't be checked; measure a model, or a part of it, that returns what it computes"
        )
    return min(_relative_difference(a, b) for a, b in pairs)


def _relative_difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    finite = b.isfinite()  # logits may be masked
    difference, size = (
        float(torch.linalg.vector_norm(t[finite], dtype=torch.float64)) for t in (torch.where(a == b, 0, a - b), b)
    )
    return difference / size if difference else 0.0


def _floating(output: Any) -> list[Tensor]:
    leaves = tree_leaves(vars(output) if is_dataclass(output) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _norm_that_returns(replica: Replica, arguments: BoundArguments, seed: int, boundary: Boundary) -> str:
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
