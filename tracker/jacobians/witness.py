"""Ask the caller's own model whether the Jacobians that were formed are those of its blocks.

All other checks replay recorded calls of blocks in the replica, with their other arguments held. They can't see what the replica
does not run as the model does, nor that a block's state reaches it by another way than its first argument. So the model itself
is run, on one or two samples, and asked about each block at one row, about its values at all rows:

    values        from the recorded state, the block gives the recorded output
    derivative    J^T u, from one backward pass from the block's output to its state, along every path
    differences   J v, from the same pass and one with the states moved by h v

States are set where blocks end: the output of block l is replaced by the recorded state, so that an error is that of one block.
In the derivative pass that state is a new leaf of the graph. What the model computes from it outside the block and gives to the
block, such as a gate or a second argument, hangs on the leaf; earlier states do not. In the pass for differences the states of
all blocks are moved at once. If a block disagrees there, it is asked again with its state alone moved, which leaves what earlier
blocks give to it (keys, the first state) as it was, by +- h v and with several h: differences convict only if two steps agree.

J^T u and J v are compared with products of the Jacobian that was formed, at a row that is measured (`Witness.judge`).

A model whose weights are sharded, offloaded or quantized, or that is on another device than the measurement, is not asked
(`Witness.unasked`). Its replica is, which shows what reaches a block's output, and not whether the replica computes what the
model does. Cost: one pass of two samples with gradients and one without. Memory: the graph of one block, and of what precedes
block 1.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tracker.common.errors import UsageError
from tracker.devices import is_allocation_failure, raise_device_errors
from tracker.jacobians.slicing import Rows
from tracker.linalg.jacobian import GradientsStayOn
from tracker.linalg.precision import EPSILON, Roundings
from tracker.linalg.transfer import SEED, to_device
from tracker.model.guard import copy_nested
from tracker.model.hidden_state import bind_arguments, hidden_state, with_hidden_state
from tracker.model.inputs import Batch
from tracker.model.proposals import BlocksNotFound, chained
from tracker.model.random_numbers import Generator, Generators
from tracker.model.recording import BlockCall, Recording
from tracker.model.replica import Replica, StopForward
from tracker.model.twin import twin_of
from tracker.model.weights import is_plain
from tracker.model.wrappers import innermost
from tracker.provenance import digest
from tracker.spans.calls import at_boundaries

# By bytes of the numbers that the model computes with: the allowed errors, relative to the residual function, to J^T u and to
# J v; and the steps of differences, relative to |x|. Faults begin at 0.05. Numbers of two bytes are too coarse for differences.
# The second step is asked first: few units of a ReLU change their sign within it.
VALUES = {8: 1e-5, 4: 1e-3, 2: 5e-2}
DERIVATIVE = {8: 1e-5, 4: 5e-3, 2: 5e-2}
DIFFERENCES = {8: 1e-3, 4: 2e-2}
STEPS = {8: (1e-4, 1e-5, 1e-6), 4: (1e-2, 1e-3, 1e-4)}
ROUNDINGS = 2  # of the sums x + f and u + J^T u, beside these errors
ROWS = 3  # that are tried where values differ
# Times the change of J^T u where the states are moved by roundings: what rounding may explain
ROUNDED = 3
MOVES = 4  # of the states, in different directions
FIRST, ORDER = 1, (1, 0, 2)  # the step for all blocks at once, and those for one block alone
# Two differences agree if they are nearer to each other than this part of their distance from J v
CONVERGED = 0.3

# Gives boundary l, where the model has this tensor, its state, as (B, n, d)
State = Callable[[int, Tensor], Tensor]
Left = Callable[[int, Tensor], None]  # takes the output (B, n, d) of block l


@dataclass
class Answer:
    """What the model says of one block at one row. Vectors are in float64 on the CPU."""

    token: int
    bytes: int  # of the numbers that the block computes with
    u: Float[Tensor, " d"]
    gradient: Float[Tensor, " d"]  # u^T d(block) / dx along every path
    # |u^T d(block) / dx_1| at the token, along what was computed from the first state x_1 before block 1 began
    beside: float
    v: Float[Tensor, " d"]
    size: float  # |x|
    growth: float  # |output| / |x|
    y: Float[Tensor, " d"]  # output
    # d(block) / dx v, from y and a state that is moved by the first step; None for numbers of two bytes
    difference: Float[Tensor, " d"] | None

    def step(self, i: int) -> float:
        """Return the multiple of v that is as long as the i-th step, h |x|."""
        return STEPS[self.bytes][i] * (self.size or 1) / _norm(self.v)


@dataclass
class _Backward:
    """What one block's part of a backward pass gives at a row, in float64 on the CPU."""

    bytes: int  # of the numbers that the block computes with
    x: Float[Tensor, " d"]
    y: Float[Tensor, " d"]
    u: Float[Tensor, " d"]  # rounded as it was in the pass
    gradient: Float[Tensor, " d"]
    beside: Float[Tensor, ""]  # as in `Answer`
    values: Float[Tensor, "3 B n"]  # at all rows: |f - the recorded f|, |f| recorded, |output|


class Witness:
    """The caller's model, asked about the blocks of one recorded call; its replica where that can't be (`unasked`).

    Args:
        replica: the replica that was recorded.
        batch: the forward call.
        recording: of this call.
        rows: its rows that are measured.
        valid: the positions of each sample that are not padding.
    """

    def __init__(
        self,
        replica: Replica,
        batch: Batch,
        recording: Recording,
        rows: Rows,
        valid: Sequence[Sequence[int]],
    ) -> None:
        self.answers: dict[int, Answer] = {}  # by layer
        self.errors = {"values": 0.0, "derivative": 0.0, "differences": 0.0}  # the largest so far
        # Layers whose values differ from the recorded ones, and by how much
        self.wrong: dict[int, float] = {}
        self.undecided: list[int] = []  # layers whose differences do not converge
        # Layers whose J^T u differs by what rounding explains, and by how much
        self.unsteady: dict[int, float] = {}
        # Other weights have other states, and are asked about other rows.
        self.seed = SEED + int(digest([recording.calls[-1].y[:1, :1].cpu()])[:8], 16)
        self.rows, self.valid = rows, valid
        self.failed = ""  # why not even the replica was asked
        self.unasked = _why_not(replica)
        if not self.unasked:
            self.unasked = self._ask(_Passes(replica, batch, recording, replaced=False))
        if self.unasked:
            self.failed = self._ask(_Passes(replica, batch, recording, replaced=True))

    def _ask(self, passes: "_Passes") -> str:
        """Ask about all blocks; return why that failed, if it did."""
        self.passes, self.answers, self.wrong = passes, {}, {}
        self.generator = torch.Generator().manual_seed(self.seed)
        self.sample = int(
            self.rows.sample[torch.randint(len(self.rows), (), generator=self.generator)]
        )
        tokens = self.rows.token[self.rows.sample == self.sample].tolist()
        passes.choose(self.sample)
        try:
            self._ask_for_derivatives(tokens)
            for _ in range(min(len(tokens), ROWS) - 1):
                # A model in 16 bits may choose another expert than the replica, at this row
                if self.wrong:
                    self._ask_for_derivatives(tokens)
            # What the model computes may depend on the size of the batch
            if self.wrong and passes.divided:
                passes.choose_all(self.sample)
                self._ask_for_derivatives(tokens)
            fine = {l: answer for l, answer in self.answers.items() if answer.bytes in STEPS}
            for l, ahead in self._moved(fine, FIRST, 1).items():
                answer = self.answers[l]
                answer.difference = (ahead - answer.y) / answer.step(FIRST)
        # Of the model's code, whatever it is: it may need what is not installed here
        except Exception as error:
            if isinstance(error, UsageError):
                raise
            if not is_allocation_failure(error):
                raise_device_errors(error)
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return ""

    def __str__(self) -> str:
        if self.failed:
            return f"not asked: {self.unasked or self.failed}"
        errors = ", ".join(
            f"{name} {size:.1e}"
            for name, size in self.errors.items()
            if size or name != "differences"
        )
        undecided = (
            f"; differences do not converge in {len(self.undecided)} blocks"
            if self.undecided
            else ""
        )
        unsteady = ""
        if self.unsteady:
            largest = max(self.unsteady.values())
            unsteady = f"; in {len(self.unsteady)} blocks J^T u differs by up to {largest:.1e}, as roundings change it"
        copy = f"not asked: {self.unasked}; its copy " if self.unasked else ""
        return f"{copy}agrees at one row of each block; errors: {errors}{undecided}{unsteady}"

    # Asking.

    def _ask_for_derivatives(self, tokens: Sequence[int]) -> None:
        """Ask for the values and for J^T u of each block at one of these tokens, drawn for each block, in one pass."""
        passes, d = self.passes, self.passes.calls[0].x.shape[-1]
        drawn = torch.randint(len(tokens), (passes.L,), generator=self.generator).tolist()
        u, v = torch.randn(2, passes.L, d, generator=self.generator, dtype=torch.float64)
        questions = {l: (tokens[drawn[l - 1]], u[l - 1]) for l in range(1, passes.L + 1)}
        found = self._pass_backward(questions)
        asked, self.wrong = self.wrong or questions, {}
        for l in asked:
            row = found[l]
            size = _norm(row.x)
            growth = _norm(row.y) / (size or 1)
            self.answers[l] = Answer(
                questions[l][0],
                row.bytes,
                row.u,
                row.gradient,
                float(row.beside),
                v[l - 1],
                size,
                growth,
                row.y,
                None,
            )
            error, excess = self._value_error(row.values, row.bytes, questions[l][0])
            if excess <= 1:
                self.errors["values"] = max(self.errors["values"], error)
            else:
                self.wrong[l] = error

    def _pass_backward(
        self, questions: dict[int, tuple[int, Tensor]], moved: int = 0
    ) -> dict[int, "_Backward"]:
        """Run the model, and the backward pass of some blocks from their outputs at a token, weighted by u, to their states.

        Args:
            questions: by layer, the token and u.
            moved: bytes of the numbers by whose roundings the states and u are moved; 0: not at all.
        """
        passes, leaf = self.passes, torch.empty(0)
        # Of each block, the fields of `_Backward` except the first
        found: dict[int, tuple[Tensor, ...]] = {}
        least: dict[int, int] = {}

        def disturbed(t: Tensor) -> Tensor:
            if not moved:
                return t
            rounding = torch.finfo(t.dtype).eps if t.itemsize == moved else EPSILON[moved]
            return t * (1 + rounding * torch.randn(t.shape, generator=self.generator).to(t))

        def begin(l: int, state: Tensor) -> Tensor:
            nonlocal leaf
            leaf, roundings.least = disturbed(passes.recorded(l, state)), state.itemsize
            # The model may work in place, which a leaf does not allow
            return leaf.requires_grad_().clone()

        def end(l: int, y: Tensor) -> None:
            if l not in questions:
                return
            least[l] = min(y.itemsize, roundings.least)
            token, u = questions[l]
            row, (cotangent,) = (passes.at, token), to_device(y.device, disturbed(u.to(y.dtype)))
            product = (y[row] * cotangent).sum()
            gradient, beside = passes.gradients(product, leaf, row)
            x, y = leaf.detach(), y.detach()
            f = passes.recorded(l, y, torch.float64) - passes.recorded(l - 1, y, torch.float64)
            values = torch.stack([_norms(y.double() - x.double() - f), _norms(f), _norms(y)])
            found[l] = (x[row], y[row], cotangent, gradient[row], beside, values)

        with torch.enable_grad(), GradientsStayOn(), Roundings() as roundings:
            passes.run(begin, end, max(questions))
        tensors = [_plain(torch.stack(of_all)) for of_all in zip(*found.values(), strict=True)]
        return {l: _Backward(least[l], *of_one) for l, *of_one in zip(found, *tensors, strict=True)}

    def _value_error(
        self, values: Float[Tensor, "3 B n"], least: int, token: int
    ) -> tuple[float, float]:
        """Return the largest error of a block's f, relative to f, and the largest multiple of what is allowed.

        Numbers of two bytes are compared at the block's row alone: a router may choose another expert at others.
        """
        first = self.passes.samples.start or 0
        compared = torch.zeros(values.shape[1:], dtype=torch.bool)
        for b in range(len(compared)):
            compared[b, self.valid[first + b]] = least > 2
        compared[self.passes.at, token] = True
        error, of_f, of_y = values[:, compared]
        of_f = of_f.clamp_min(torch.finfo(torch.float64).tiny)
        allowed = VALUES[least] * of_f + ROUNDINGS * EPSILON[least] * of_y
        return float((error / of_f).max()), float((error / allowed).max())

    def _moved(
        self, asked: dict[int, Answer], step: int, sign: int
    ) -> dict[int, Float[Tensor, " d"]]:
        """Ask for the outputs of some blocks at their rows, with the states of all of them moved by a step along v."""
        passes, ends = self.passes, {}
        if not asked:
            return {}

        def begin(l: int, found: Tensor) -> Tensor:
            x = passes.recorded(l, found)
            if (answer := asked.get(l + 1)) is not None:
                x[passes.at, answer.token] += sign * answer.step(step) * answer.v.to(x)
            return x

        def end(l: int, y: Tensor) -> None:
            if l in asked:
                ends[l] = y[passes.at, asked[l].token]

        with torch.no_grad():
            passes.run(begin, end, max(asked))
        return dict(zip(ends, _plain(torch.stack([*ends.values()])), strict=True))

    def _differences_alone(
        self, l: int, step: int
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
        """Ask for J v of one block by the differences to both sides, with its state alone moved."""
        answer = self.answers[l]
        ahead, behind = (self._moved({l: answer}, step, sign)[l] for sign in (1, -1))
        return (ahead - answer.y) / answer.step(step), (answer.y - behind) / answer.step(step)

    # Judging.

    def judge(
        self,
        call: BlockCall,
        rows: Rows,
        J: Float[Tensor, "R d d"],
        *,
        exact: bool,
        gradients: bool,
        differences: bool,
    ) -> None:
        """Compare the Jacobians of a call at some rows, without the identity, with what the model says.

        Args:
            exact: whether J was formed in the precision of its dtype.
            gradients: whether J is meant to be what autograd computes.
            differences: whether J is meant to be the derivative of the values.

        Raises:
            UsageError: if they differ, or the block of the model gives another output than the recorded one.
        """
        answer = self.answers.get(call.layer)
        if (
            answer is None
            or self.failed
            or call is not self.passes.calls[call.layer - 1]
            or rows.source is not None
        ):
            return
        self.require_values(call.layer)
        at = ((rows.sample == self.sample) & (rows.token == answer.token)).nonzero()
        if not len(at):
            return
        J = J[int(at[0])]
        least = min(answer.bytes, J.itemsize)
        (given,) = to_device(J.device, torch.stack([answer.u, answer.v]).to(J.dtype))
        JTu, Jv = _plain(torch.stack([J.mT @ given[0], J @ given[1]]))
        if gradients:
            if call.layer == 1:
                self._require_no_way_beside(call, answer, JTu)
            rounding = ROUNDINGS * EPSILON[least] * _ratio(answer.u, JTu)
            error = _ratio(answer.gradient - answer.u - JTu, JTu)
            if error <= DERIVATIVE[least if exact else 2] + rounding:
                self.errors["derivative"] = max(self.errors["derivative"], error)
            elif error <= ROUNDED * self._rounding_of_gradient(call.layer, answer, JTu):
                self.unsteady[call.layer] = error
            else:  # also where it is NaN
                why = f"J^T u by its backward pass differs by {error:.1e}"
                raise self._other_derivative(call, why)
        if answer.difference is not None and differences:
            self._judge_differences(call, answer, Jv, least, exact)

    def _require_no_way_beside(self, call: BlockCall, answer: Answer, JTu: Tensor) -> None:
        """Raise UsageError if block 1 alone depends on what the model computed from its state before it began.

        That which later blocks depend on, too, such as the first state itself, is a constant by convention.
        """
        most = DERIVATIVE[answer.bytes] * _norm(JTu)
        later = any(
            other.beside > DERIVATIVE[other.bytes] * _norm(other.gradient - other.u)
            for l, other in self.answers.items()
            if l > 1
        )
        if answer.beside > most and not later and not self.passes.replica.description.fixed:
            part = answer.beside / max(_norm(JTu), torch.finfo(torch.float64).tiny)
            raise self._other_derivative(
                call,
                f"J^T u of what the model computed from the state before the block began is {part:.1e}",
            )

    def _rounding_of_gradient(self, l: int, answer: Answer, JTu: Tensor) -> float:
        """Return how much the model's own J^T u changes where the states and u are moved by roundings, relative to that formed.

        The backward pass of a saturated softmax can amplify a rounding to percents of its result.
        """
        question = {l: (answer.token, answer.u)}
        again = self._pass_backward(question)[l].gradient
        if _ratio(again - answer.gradient, JTu) > DERIVATIVE[answer.bytes]:
            return 0.0  # what changes without a move is no rounding
        found = [self._pass_backward(question, answer.bytes)[l].gradient for _ in range(MOVES)]
        return max(_ratio(gradient - answer.gradient, JTu) for gradient in found)

    def _judge_differences(
        self, call: BlockCall, answer: Answer, Jv: Tensor, least: int, exact: bool
    ) -> None:
        rounding = ROUNDINGS * EPSILON[answer.bytes] * (1 + answer.growth) * _ratio(answer.v, Jv)
        exactly = DIFFERENCES[least] if exact else DERIVATIVE[2]

        def error(difference: Tensor) -> float:
            return _ratio(difference - answer.v - Jv, Jv)

        def agrees(difference: Tensor, step: int, steps: int) -> bool:
            found = error(difference)
            agreed = found <= exactly + rounding / (steps * STEPS[answer.bytes][step])
            if agreed:
                self.errors["differences"] = max(self.errors["differences"], found)
            return agreed

        # With this block's state alone moved: their mean, and how far apart those to both sides are
        alone: dict[int, Tensor] = {}
        kinks: dict[int, float] = {}
        assert answer.difference is not None
        if agrees(answer.difference, FIRST, 1):
            return
        for step in ORDER:
            ahead, behind = self._differences_alone(call.layer, step)
            alone[step] = (ahead + behind) / 2
            kinks[step] = _ratio(ahead - behind, Jv)
            # At a kink, such as a ReLU's, J is that of one side, or of each for some units.
            if agrees(alone[step], step, 2) or agrees(ahead, step, 1) or agrees(behind, step, 1):
                return
        errors = {step: error(difference) for step, difference in alone.items()}
        for step in (0, 1):
            apart = _ratio(alone[step] - alone[step + 1], Jv)
            error_of_both = min(errors[step], errors[step + 1])
            if apart <= CONVERGED * error_of_both and kinks[step + 1] <= error_of_both:
                raise self._other_derivative(
                    call, f"J v by differences of its values differs by {errors[step]:.1e}"
                )
        self.undecided.append(call.layer)

    def require_values(self, l: int) -> None:
        """Raise UsageError if block l of the model gives another output than the recorded one."""
        if l not in self.wrong:
            return
        raise UsageError(
            f"block {l} ({self.passes.calls[l - 1].name}): from the same state, the model computes another output than its copy "
            f"that is measured (relative error {self.wrong[l]:.1e}). Something in it is no part of the copy: a hook that changes "
            "values, a function or a kernel that was registered or replaced after the model was made. Make it part of the "
            "block's forward"
        )

    def require_all_values(self) -> None:
        """Raise UsageError if a block of the model gives another output than the recorded one."""
        for l in self.wrong:
            self.require_values(l)

    def _other_derivative(self, call: BlockCall, difference: str) -> BlocksNotFound:
        finding = (
            f"block {call.layer} ({call.name}): the Jacobian of its call is not the derivative of what the model computes there: "
            f"{difference} (relative). The state reaches the block's output by another way than the block's first argument, such "
            "as another argument that is the state or is computed from it, or an attribute that the model sets; or the block's "
            "code depends on the batch."
        )
        return BlocksNotFound(finding, chained(self.passes.replica.description))


def _why_not(replica: Replica) -> str:
    """Return why the caller's model can't be asked; empty if it can."""
    model = innermost(replica.model)
    weights = [*model.parameters(), *model.buffers()]
    if not all(map(is_plain, weights)):
        return "its weights are sharded, offloaded, quantized or sparse"
    if any(t.is_inference() for t in weights):
        return "its weights were made in inference mode"
    elsewhere = {t.device for t in weights} - {replica.device}
    return (
        f"it is on {elsewhere.pop()} and the measurement on {replica.device}" if elsewhere else ""
    )


class _Passes:
    """Passes of the caller's model on a sample or two, with the states set where blocks begin and end.

    A batch that may not divide into samples is run whole. If the model can't be asked, its replica runs.
    """

    def __init__(
        self, replica: Replica, batch: Batch, recording: Recording, replaced: bool
    ) -> None:
        self.replica = replica
        self.model = innermost(replica.model)
        self.replaced = replaced
        self.calls, self.L = recording.calls, len(recording.calls)
        self.whole = batch
        self.choose_all(0)
        self.seed = recording.seed or 0
        self.cast = False  # whether the inputs are cast to the dtype of the weights
        self.ended = -1  # blocks that have ended in this pass; -1 before the first begins
        self.first: Tensor | None = (
            None  # the state that this pass computed for block 1, with what it was computed from
        )

    @property
    def divided(self) -> bool:
        """Whether not all samples run."""
        return self.samples != slice(None)

    def choose(self, sample: int) -> None:
        """Run this sample and another one, as a model may do otherwise with one alone; a batch that may not divide runs whole."""
        self.choose_all(sample)
        if self.whole.divides:
            start = max(0, min(sample, len(self.whole.labels) - 2))
            self.samples, self.at = slice(start, start + 2), sample - start
            self.batch = self.whole.part(self.samples)

    def choose_all(self, sample: int) -> None:
        """Run all samples, and ask about this one."""
        self.batch, self.samples, self.at = self.whole, slice(None), sample

    def recorded(
        self, l: int, like: Tensor, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "B n d"]:
        """Return a copy of the recorded state at boundary l, on the device of a tensor, in its dtype or another."""
        state = self.calls[l].x if l < self.L else self.calls[-1].y
        return state[self.samples].to(like.device, dtype or like.dtype, copy=True)

    def gradients(
        self, product: Tensor, leaf: Tensor, row: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient to a block's state, and the size of that to a row of the first state along what was computed from
        it before block 1 began, which the leaf does not reach.
        """
        first = self.first is not None and self.first.requires_grad
        inputs = [leaf, self.first] if first else [leaf]
        # The mode of boundaries would replace the first state by the leaf
        with torch._C.DisableTorchFunction():
            # What was computed before block 1 began is differentiated once for each block.
            gradient, *beside = torch.autograd.grad(
                product, inputs, retain_graph=first, materialize_grads=True, allow_unused=True
            )
        if not first:
            return gradient, gradient.new_zeros((), dtype=torch.float64)
        return gradient, torch.linalg.vector_norm(
            self.replica.oriented(beside[0])[row], dtype=torch.float64
        )

    def run(self, begin: State, end: Left, last: int) -> None:
        """Run the model up to the end of block `last`."""
        if self.replaced:
            self._run_replica(begin, end, last)
            return
        try:
            self._run_model(begin, end, last)
        except RuntimeError as error:
            if self.cast or is_allocation_failure(error):
                raise
            # A model of bfloat16 weights may take inputs of float32 in training alone, under autocast.
            raise_device_errors(error)
            self.cast = True
            self._run_model(begin, end, last)

    def _run_model(self, begin: State, end: Left, last: int) -> None:
        arguments, keywords = copy_nested(
            (list(self.batch.arguments), self.batch.keywords), self._copied, {}
        )
        generators = Generators(self.replica.device)
        with twin_of(self.model, generators) as twin:
            generators.seed(self.seed)
            with self._hooked(twin.get_submodule, begin, end, last), suppress(StopForward):
                twin(*arguments, **keywords)

    def _run_replica(self, begin: State, end: Left, last: int) -> None:
        replica = self.replica.fresh()
        arguments, keywords = replica.copy_inputs((self.batch.arguments, self.batch.keywords))
        weights = (
            replica.materialize(replica.module)
            if replica.description.spans
            else replica.stream_blocks(lambda *_: None, lambda *_: None)
        )
        with weights, self._hooked(replica.module.get_submodule, begin, end, last):
            replica.run(arguments, keywords, self.seed)

    @contextmanager
    def _hooked(
        self, module: Callable[[str], nn.Module], begin: State, end: Left, last: int
    ) -> Iterator[None]:
        """Set states where blocks begin, and take them where blocks end, in a pass of a model whose modules have these names."""
        self.ended, self.first = -1, None
        from_inputs = ExitStack()  # until block 1 begins, what modules return is part of the graph
        oriented = self.replica.oriented

        def leave(found: Tensor) -> Tensor:
            self.ended += 1
            end(self.ended, oriented(found))
            if self.ended == last:
                raise StopForward(None)
            return oriented(begin(self.ended, found))

        def enter(found: Tensor) -> Tensor:
            self.ended = 0
            self.first = found
            from_inputs.close()
            return oriented(begin(0, found))

        spans = self.replica.description.spans
        hooks = {spans[0][0]: enter} | {end: leave for _, end in spans} if spans else {}
        try:
            with (
                from_inputs,
                at_boundaries(module, hooks) if spans else self._at_modules(module, enter, leave),
            ):
                if torch.is_grad_enabled():
                    from_inputs.callback(register_module_forward_hook(_in_graph).remove)
                yield
        finally:
            self.first = None  # with its graph
        if self.ended != last:
            raise RuntimeError(f"hooks saw {max(self.ended, 0)} of its {last} blocks run")

    @contextmanager
    def _at_modules(
        self,
        module: Callable[[str], nn.Module],
        enter: Callable[[Tensor], Tensor],
        leave: Callable[[Tensor], Tensor],
    ) -> Iterator[None]:
        # One may be several
        blocks = [module(name) for name in dict.fromkeys(call.name for call in self.calls)]

        def begin(block: nn.Module, args: tuple, kwargs: dict) -> Any:
            if self.ended >= 0:
                return None
            bound = bind_arguments(block, args, kwargs)
            state = next(iter(bound.arguments.values()))
            new = enter(state)
            # That another argument is the state as well can't be told from a constant in one block; others show it.
            alike = state if self.L == 1 else None
            for i, (name, value) in enumerate(bound.arguments.items()):
                bound.arguments[name] = (
                    new if i == 0 or (value is alike and value is not None) else value
                )
            return bound.args, bound.kwargs

        def end(block: nn.Module, args: tuple, output: Any) -> Any:
            return with_hidden_state(output, leave(hidden_state(output)))

        with ExitStack() as stack:
            stack.callback(
                blocks[0].register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove
            )
            for block in blocks:
                stack.callback(block.register_forward_hook(end).remove)
            yield

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Generator):
            return deepcopy(value)
        if not isinstance(value, Tensor):
            return value
        weights = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        dtype = (
            next(weights, value.dtype) if self.cast and value.is_floating_point() else value.dtype
        )
        copy = value.to(self.replica.device, dtype, copy=True)
        if (
            torch.is_grad_enabled()
            and copy.is_floating_point()
            and copy.numel() == self.calls[0].x[self.samples].numel()
        ):
            return copy.requires_grad_().clone()  # it may be the first state
        return copy


def _in_graph(module: nn.Module, args: tuple, output: Any) -> Any:
    """Return a module's output as part of a graph that begins there at the latest: a forward hook."""
    if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
        return output.detach().requires_grad_().clone()  # a leaf does not allow work in place
    return output


def _plain(t: Tensor) -> Tensor:
    return t.detach().cpu().double()


def _norms(rows: Float[Tensor, "B n d"]) -> Float[Tensor, "B n"]:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _ratio(part: Tensor, whole: Tensor) -> float:
    return _norm(part) / max(_norm(whole), torch.finfo(torch.float64).tiny)


HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def form_of(model: nn.Module) -> Any:
    """Return what the model is made of, without its weights: the classes and the hooks of its modules, by name.

    Hooks are told apart by their keys, too, which torch gives once: another one may lie where a removed one lay.
    """
    parts = (
        (name, type(part), *(vars(part)[kind] for kind in HOOKS))
        for name, part in model.named_modules()
    )
    return tuple(
        (name, cls, *(tuple((key, id(hook)) for key, hook in hooks.items()) for hooks in both))
        for name, cls, *both in parts
    )
