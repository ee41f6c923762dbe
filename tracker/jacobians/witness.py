"""Ask the caller's own model whether the Jacobians that were formed are those of its blocks.

What forms a Jacobian replays recorded calls of blocks in the replica, with their other arguments held. It can't see what the
replica does not run as the model does, nor that a block's state reaches it by another way than its first argument, nor that
samples depend on each other. So the model itself is run, cut at the boundaries of its blocks (`cut_model`), and asked about each
block at one row of each sample, about its values at all rows:

    values        from the recorded state, the block gives the recorded output
    derivative    J^T u, along every path, in two backward passes: from the rows of half of the samples, then of the others.
                  Each must leave the states of the other half without a gradient
    differences   J v, from the same pass and one with the states of all blocks moved by h v. There the first half of the samples
                  are near copies of a row of the others, which compete with it for any limited capacity

J^T u and J v are compared with products of the Jacobian that was formed, at rows that are measured (`Witness.judge`). If a block
disagrees in the differences, it is asked again with its state alone moved, which leaves what earlier blocks give to it (keys, the
first state) as it was, by +- h v and with several h: differences convict only if two steps agree.

Cost: one pass with gradients and one without, of all samples if they are small, else of two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tracker.common.errors import UsageError
from tracker.common.values import Witness as Asked
from tracker.devices import is_allocation_failure, raise_device_errors
from tracker.jacobians.cut_model import CutModel, why_not
from tracker.jacobians.slicing import Rows
from tracker.linalg.jacobian import GradientsStayOn
from tracker.linalg.precision import EPSILON, FAST, Roundings
from tracker.linalg.transfer import SEED, to_device
from tracker.model.attention import OriginalAttention, intercept_attention
from tracker.model.inputs import Batch
from tracker.model.proposals import BlocksNotFound, chained
from tracker.model.recording import BlockCall, Recording
from tracker.model.replica import Replica
from tracker.provenance import digest

# By bytes of the numbers that the model computes with: the allowed errors, relative to the residual function, to J^T u and to
# J v; and the steps of differences, relative to |x|. Faults begin at 0.05. Numbers of two bytes are too coarse for differences.
# The second step is asked first: few units of a ReLU change their sign within it.
VALUES = {8: 1e-5, 4: 1e-3, 2: 5e-2}
DERIVATIVE = {8: 1e-5, 4: 5e-3, 2: 5e-2}
DIFFERENCES = {8: 1e-3, 4: 2e-2}
STEPS = {8: (1e-4, 1e-5, 1e-6), 4: (1e-2, 1e-3, 1e-4)}
# Derivatives by the states of other samples, relative to J^T u
MIXES = {8: 1e-12, 4: 1e-5, 2: FAST}
ROUNDINGS = 2  # of the sums x + f and u + J^T u, beside these errors
ROWS = 3  # that are tried where values differ
# Times the change of J^T u where the states are moved by roundings: what rounding may explain
ROUNDED = 3
MOVES = 4  # of the states, in different directions
FIRST, ORDER = 1, (1, 0, 2)  # the step for all blocks at once, and those for one block alone
# Two differences agree if they are nearer to each other than this part of their distance from J v
CONVERGED = 0.3
NEAR = 1e-3  # how far near copies of a row are apart, relative to it


@dataclass
class Answer:
    """What the model says of one block at a row of each sample. Vectors are in float64 on the CPU."""

    tokens: Sequence[int]
    bytes: int  # of the numbers that the block computes with
    u: Float[Tensor, "B d"]
    gradient: Float[Tensor, "B d"]  # u^T d(block) / dx along every path
    # |u^T d(block) / dx_1| at the row, along what was computed from the first state x_1 before block 1 began
    beside: Float[Tensor, " B"]
    v: Float[Tensor, "B d"]
    size: Float[Tensor, " B"]  # |x|
    y: Float[Tensor, "B d"]  # output
    right: Bool[Tensor, " B"]  # whether the output is the recorded one
    # Of the second half of the samples: d(block) / dx v, from y and a state that is moved by the first step; None for numbers
    # of two bytes
    difference: Any = None

    def step(self, i: int) -> Float[Tensor, "B 1"]:
        """Return the multiple of v that is as long as the i-th step, h |x|."""
        size = torch.where(self.size == 0, 1.0, self.size)
        return (STEPS[self.bytes][i] * size / _norm(self.v))[:, None]


@dataclass
class _Backward:
    """What one block's part of the backward passes gives at the rows, in float64 on the CPU."""

    bytes: int  # of the numbers that the block computes with
    x: Float[Tensor, "B d"]
    y: Float[Tensor, "B d"]
    u: Float[Tensor, "B d"]  # rounded as it was in the pass
    gradient: Float[Tensor, "B d"]
    beside: Float[Tensor, " B"]  # as in `Answer`
    leak: Float[Tensor, ""]  # the gradient by other samples, relative to J^T u
    values: Float[Tensor, "3 B n"]  # at all rows: |f - the recorded f|, |f| recorded, |output|


Questions = Mapping[int, tuple[Sequence[int], Float[Tensor, "B d"]]]  # by layer: tokens and u


@dataclass
class Findings:
    """What the model said of all calls of a measurement.

    Attributes:
        errors: the largest.
        undecided: layers whose differences do not converge.
        unsteady: layers whose J^T u differs by what rounding explains, and by how much.
        unasked: why the replica was asked in place of the model.
        failed: why not even the replica was asked.
    """

    errors: dict[str, float] = field(
        default_factory=lambda: {"values": 0.0, "derivative": 0.0, "differences": 0.0}
    )
    undecided: set[int] = field(default_factory=set)
    unsteady: dict[int, float] = field(default_factory=dict)
    unasked: str = ""
    failed: str = ""

    def note(self, name: str, error: float) -> None:
        """Keep the largest error of a name."""
        self.errors[name] = max(self.errors[name], error)

    def __str__(self) -> str:
        if self.failed:
            return f"not asked: {self.unasked or self.failed}"
        errors = ", ".join(
            f"{name} {size:.1e}"
            for name, size in self.errors.items()
            if size or name != "differences"
        )
        undecided = unsteady = ""
        if self.undecided:
            undecided = f"; differences do not converge in {len(self.undecided)} blocks"
        if self.unsteady:
            largest = max(self.unsteady.values())
            unsteady = f"; in {len(self.unsteady)} blocks J^T u differs by up to {largest:.1e}, as roundings change it"
        copy = f"not asked: {self.unasked}; its copy " if self.unasked else ""
        return f"{copy}agrees at one row of each block; errors: {errors}{undecided}{unsteady}"


class Witness:
    """The caller's model, asked about the blocks of one recorded call; its replica where that can't be.

    Args:
        replica: the replica that was recorded.
        batch: the forward call.
        recording: of this call.
        rows: its rows that are measured.
        valid: the positions of each sample that are not padding.
        findings: of the measurement.
        asked: "off": the replica in place of the model.
    """

    def __init__(
        self,
        replica: Replica,
        batch: Batch,
        recording: Recording,
        rows: Rows,
        valid: Sequence[Sequence[int]],
        findings: Findings,
        asked: Asked = "model",
    ) -> None:
        self.answers: dict[int, Answer] = {}  # by layer
        # Layers whose values differ from the recorded ones, and by how much
        self.wrong: dict[int, float] = {}
        self.mixing: dict[
            int, float
        ] = {}  # layers whose samples depend on each other, and by how much
        self.moving: set[int] = set()  # layers whose attention has a mask that depends on the state
        # Other weights have other states, and are asked about other rows.
        self.seed = SEED + int(digest([recording.calls[-1].y[:1, :1].cpu()])[:8], 16)
        self.rows, self.valid = rows, valid
        self.findings = findings
        unasked = "the caller turned it off" if asked == "off" else why_not(replica)
        if not unasked:
            unasked = self._ask(CutModel(replica, batch, recording, replaced=False))
        if unasked:
            findings.unasked = unasked
            findings.failed = self._ask(CutModel(replica, batch, recording, replaced=True))

    def _ask(self, model: CutModel) -> str:
        """Ask about all blocks; return why that failed, if it did."""
        self.model, self.answers, self.wrong, self.mixing = model, {}, {}, {}
        self.generator = torch.Generator().manual_seed(self.seed)
        model.choose(int(torch.randint(len(self.valid), (), generator=self.generator)))
        try:
            self._ask_for_derivatives()
            for _ in range(ROWS - 1):
                # A model in 16 bits may choose another expert than the replica, at these rows
                if self.wrong:
                    self._ask_for_derivatives()
            # What the model computes may depend on the size of the batch
            if self.wrong and model.divided:
                model.choose_all()
                self._ask_for_derivatives()
            fine = {l: answer for l, answer in self.answers.items() if answer.bytes in STEPS}
            for l, ahead in self._moved(fine, FIRST, 1, crowded=True).items():
                self.answers[l].difference = self._difference(self.answers[l], ahead, FIRST)
        # Of the model's code, whatever it is: it may need what is not installed here
        except Exception as error:
            if isinstance(error, UsageError):
                raise
            if not is_allocation_failure(error):
                raise_device_errors(error)
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return ""

    # Asking.

    def _ask_for_derivatives(self) -> None:
        """Ask for the values, and for J^T u of each block at a row of each sample, drawn for each block, in one pass."""
        L, d, asked = self.model.L, self.model.calls[0].x.shape[-1], self.model.asked
        tokens = [self._draw_token(sample, L) for sample in asked]
        u, v = torch.randn(2, L, len(asked), d, generator=self.generator, dtype=torch.float64)
        questions = {l: ([of[l - 1] for of in tokens], u[l - 1]) for l in range(1, L + 1)}
        found = self._pass_backward(questions)
        again, self.wrong = self.wrong or questions, {}
        for l in again:
            row, at = found[l], questions[l][0]
            right, error = self._compare_values(row.values, row.bytes, at)
            self.answers[l] = Answer(
                at, row.bytes, row.u, row.gradient, row.beside, v[l - 1], _norm(row.x), row.y, right
            )
            if row.leak > MIXES[row.bytes]:
                self.mixing[l] = float(row.leak)
            if right.any():
                self.findings.note("values", error)
            else:
                self.wrong[l] = error

    def _draw_token(self, sample: int, count: int) -> list[int]:
        """Draw tokens of a sample among those that are measured."""
        tokens = self.rows.token[self.rows.sample == sample].tolist() or [self.valid[sample][-1]]
        drawn = torch.randint(len(tokens), (count,), generator=self.generator)
        return [tokens[i] for i in drawn.tolist()]

    def _pass_backward(self, questions: Questions, moved: int = 0) -> dict[int, _Backward]:
        """Run the model, and the backward passes of some blocks from their outputs at rows, weighted by u, to their states.

        Args:
            moved: bytes of the numbers by whose roundings the states and u are moved; 0: not at all.
        """
        model, leaf = self.model, torch.empty(0)
        # Of each block, the fields of `_Backward` except the first
        found: dict[int, tuple[Tensor, ...]] = {}
        least: dict[int, int] = {}
        half = len(model.asked) // 2

        def disturbed(t: Tensor) -> Tensor:
            if not moved:
                return t
            rounding = torch.finfo(t.dtype).eps if t.itemsize == moved else EPSILON[moved]
            return t * (1 + rounding * torch.randn(t.shape, generator=self.generator).to(t))

        def begin(l: int, state: Tensor) -> Tensor:
            nonlocal leaf
            leaf, roundings.least = disturbed(model.recorded(l, state)), state.itemsize
            # The model may work in place, which a leaf does not allow
            return leaf.requires_grad_().clone()

        def see(attention: OriginalAttention, *given: Any) -> Any:
            mask = given[3]
            if isinstance(mask, Tensor) and mask.requires_grad and model.ended >= 0:
                (own,) = torch.autograd.grad(mask.sum(), leaf, retain_graph=True, allow_unused=True)
                if own is not None:
                    self.moving.add(model.ended + 1)
            return attention(*given)

        def end(l: int, y: Tensor) -> None:
            if l not in questions:
                return
            least[l] = min(y.itemsize, roundings.least)
            tokens, u = questions[l]
            at, (cotangent,) = model.rows(tokens, y), to_device(y.device, disturbed(u.to(y.dtype)))
            weighted = (y[at] * cotangent).sum(-1)
            halves = [weighted[part].sum() for part in (slice(half), slice(half, None))[not half :]]
            gradients, beside = model.gradients(halves, leaf, at)
            own = torch.cat([gradients[0][:half], gradients[-1][half:]])[at]
            leak = own.new_zeros(())
            if half:
                JTu = (own - cotangent).abs()
                of_others = [gradients[0][half:].abs().amax(), gradients[1][:half].abs().amax()]
                # NaN is 0 times the infinite derivative of a row that attends to nothing: no mixing.
                leak = (
                    (torch.stack(of_others) / torch.stack([JTu[:half].amax(), JTu[half:].amax()]))
                    .nan_to_num(0, torch.inf)
                    .amax()
                )
            x, y = leaf.detach(), y.detach()
            f = model.recorded(l, y, torch.float64) - model.recorded(l - 1, y, torch.float64)
            values = torch.stack([_norm(y.double() - x.double() - f), _norm(f), _norm(y)])
            found[l] = (x[at], y[at], cotangent, own, beside, leak, values)

        with (
            torch.enable_grad(),
            GradientsStayOn(),
            Roundings() as roundings,
            intercept_attention(see),
        ):
            model.run(begin, end, max(questions))
        tensors = [_plain(torch.stack(of_all)) for of_all in zip(*found.values(), strict=True)]
        return {l: _Backward(least[l], *of_one) for l, *of_one in zip(found, *tensors, strict=True)}

    def _compare_values(
        self, values: Float[Tensor, "3 B n"], least: int, tokens: Sequence[int]
    ) -> tuple[Bool[Tensor, " B"], float]:
        """Return whether a block's f is the recorded one at each sample's row, and the largest error, relative to f.

        Numbers of two bytes are compared at the rows alone: a router may choose another expert at others. The others are compared
        at all rows; if one differs, none is right.
        """
        compared = torch.zeros(values.shape[1:], dtype=torch.bool)
        for b, sample in enumerate(self.model.asked):
            compared[b, self.valid[sample] if least > 2 else tokens[b]] = True
        error, of_f, of_y = values
        of_f = of_f.clamp_min(torch.finfo(torch.float64).tiny)
        allowed = VALUES[least] * of_f + ROUNDINGS * EPSILON[least] * of_y
        right = ((error <= allowed) | ~compared).all(-1)
        if least > 2:
            right &= right.all()
        return right, float((error / of_f)[compared].max())

    def _moved(
        self, asked: dict[int, Answer], step: int, sign: int, crowded: bool
    ) -> dict[int, Float[Tensor, "b d"]]:
        """Ask for the outputs of some blocks at the rows of the second half of the samples, with their states moved along v.

        Args:
            crowded: whether all states of the first half are near copies of a row of the others.
        """
        model, ends, half = self.model, {}, len(self.model.asked) // 2
        if not asked:
            return {}

        def begin(l: int, found: Tensor) -> Tensor:
            x = model.recorded(l, found)
            if (answer := asked.get(l + 1)) is not None:
                at = model.rows(answer.tokens, x)
                if crowded and half:
                    row = x[at][-1]
                    noise = torch.randn(x[:half].shape, generator=self.generator).to(x)
                    x[:half] = row + NEAR * row.square().mean().sqrt() * noise
                at = at[0][half:], at[1][half:]
                (moves,) = to_device(
                    x.device, (sign * answer.step(step) * answer.v)[half:].to(x.dtype)
                )
                x[at] += moves
            return x

        def end(l: int, y: Tensor) -> None:
            if l in asked:
                ends[l] = y[model.rows(asked[l].tokens, y)][half:]

        with torch.no_grad():
            model.run(begin, end, max(asked))
        return dict(zip(ends, _plain(torch.stack([*ends.values()])), strict=True))

    def _difference(self, answer: Answer, moved: Tensor, step: int) -> Float[Tensor, "b d"]:
        half = len(answer.y) // 2
        return (moved - answer.y[half:]) / answer.step(step)[half:]

    def _differences_alone(
        self, l: int, step: int, crowded: bool = False
    ) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
        """Ask for J v of one block by the differences to both sides, with its state alone moved."""
        answer = self.answers[l]
        ahead, behind = (self._moved({l: answer}, step, sign, crowded)[l] for sign in (1, -1))
        return self._difference(answer, ahead, step), -self._difference(answer, behind, step)

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
            or self.findings.failed
            or call is not self.model.calls[call.layer - 1]
            or rows.source is not None
        ):
            return
        self.require_values(call.layer)
        samples, tokens = torch.tensor(self.model.asked), torch.tensor(answer.tokens)
        same = (rows.sample == samples[:, None]) & (rows.token == tokens[:, None])
        asked, at = (same & answer.right[:, None]).nonzero(as_tuple=True)
        if not len(asked):
            return
        least = min(answer.bytes, J.itemsize)
        (at,) = to_device(J.device, at)
        (given,) = to_device(J.device, torch.stack([answer.u, answer.v])[:, asked].to(J.dtype))
        J = J[at]
        JTu, Jv = _plain(
            torch.stack([(J.mT @ given[0, ..., None])[..., 0], (J @ given[1, ..., None])[..., 0]])
        )
        if gradients:
            if call.layer == 1:
                self._require_no_way_beside(call, answer, _norm(JTu).max())
            rounding = ROUNDINGS * EPSILON[least] * _ratio(answer.u[asked], JTu)
            errors = _ratio((answer.gradient - answer.u)[asked] - JTu, JTu)
            error = float(errors.max())
            if (errors <= DERIVATIVE[least if exact else 2] + rounding).all():
                self.findings.note("derivative", error)
            elif (
                errors <= ROUNDED * self._rounding_of_gradient(call.layer, answer, asked, JTu)
            ).all():
                self.findings.unsteady[call.layer] = error
            else:  # also where it is NaN
                why = f"J^T u by its backward pass differs by {error:.1e}"
                raise self._other_derivative(call, why)
        half = len(answer.y) // 2
        if answer.difference is not None and differences:
            for of_row, i in zip(Jv, (asked - half).tolist(), strict=True):
                if i >= 0:
                    self._judge_differences(call, answer, i, of_row, least, exact)

    def _require_no_way_beside(self, call: BlockCall, answer: Answer, JTu: Tensor) -> None:
        """Raise UsageError if block 1 alone depends on what the model computed from its state before it began.

        That which later blocks depend on, too, such as the first state itself, is a constant by convention.
        """
        most = DERIVATIVE[answer.bytes] * JTu
        later = any(
            bool((other.beside > DERIVATIVE[other.bytes] * _norm(other.gradient - other.u)).any())
            for l, other in self.answers.items()
            if l > 1
        )
        beside = answer.beside.max()
        if beside > most and not later and not self.model.replica.description.fixed:
            part = float(beside / JTu.clamp_min(torch.finfo(torch.float64).tiny))
            raise self._other_derivative(
                call,
                f"J^T u of what the model computed from the state before the block began is {part:.1e}",
            )

    def _rounding_of_gradient(
        self, l: int, answer: Answer, asked: Tensor, JTu: Float[Tensor, "r d"]
    ) -> Float[Tensor, " r"]:
        """Return how much the model's own J^T u changes where the states and u are moved by roundings, relative to those formed.

        The backward pass of a saturated softmax can amplify a rounding to percents of its result.
        """
        question = {l: (answer.tokens, answer.u)}

        def change(moved: int) -> Tensor:
            found = self._pass_backward(question, moved)[l].gradient
            return _ratio((found - answer.gradient)[asked], JTu)

        if (change(0) > DERIVATIVE[answer.bytes]).any():
            return torch.zeros(len(asked))  # what changes without a move is no rounding
        return torch.stack([change(answer.bytes) for _ in range(MOVES)]).amax(0)

    def _judge_differences(
        self,
        call: BlockCall,
        answer: Answer,
        i: int,
        Jv: Float[Tensor, " d"],
        least: int,
        exact: bool,
    ) -> None:
        """Judge the differences at the i-th row of the second half of the samples."""
        b = len(answer.y) // 2 + i
        v, growth = answer.v[b], _norm(answer.y[b]) / answer.size[b].clamp_min(1e-300)
        rounding = ROUNDINGS * EPSILON[answer.bytes] * (1 + growth) * _ratio(v, Jv)
        exactly = DIFFERENCES[least] if exact else DERIVATIVE[2]

        def error(difference: Tensor) -> float:
            return float(_ratio(difference - v - Jv, Jv))

        def agrees(difference: Tensor, step: int, steps: int) -> bool:
            found = error(difference)
            agreed = found <= exactly + rounding / (steps * STEPS[answer.bytes][step])
            if agreed:
                self.findings.note("differences", found)
            return bool(agreed)

        def any_agrees(step: int, crowded: bool) -> bool:
            ahead, behind = (of[i] for of in self._differences_alone(call.layer, step, crowded))
            central[step], kinks[step] = (ahead + behind) / 2, float(_ratio(ahead - behind, Jv))
            # At a kink, such as a ReLU's, J is that of one side, or of each for some units.
            return (
                agrees(central[step], step, 2) or agrees(ahead, step, 1) or agrees(behind, step, 1)
            )

        # With this block's state alone moved: their mean, and how far apart those to both sides are
        central: dict[int, Tensor] = {}
        kinks: dict[int, float] = {}
        if agrees(answer.difference[i], FIRST, 1):
            return
        for step in ORDER:
            if any_agrees(step, crowded=False):
                if b >= 1 and not any_agrees(step, crowded=True):
                    self.mixing[call.layer] = error(central[step])
                    self.require_apart(call)
                return
        errors = {step: error(difference) for step, difference in central.items()}
        for step in (0, 1):
            apart = _ratio(central[step] - central[step + 1], Jv)
            error_of_both = min(errors[step], errors[step + 1])
            if apart <= CONVERGED * error_of_both and kinks[step + 1] <= error_of_both:
                raise self._other_derivative(
                    call, f"J v by differences of its values differs by {errors[step]:.1e}"
                )
        self.findings.undecided.add(call.layer)

    def require_apart(self, call: BlockCall) -> None:
        """Raise UsageError if the samples of a block depend on each other."""
        if call.layer in self.mixing:
            raise UsageError(
                f"block {call.layer} ({call.name}) mixes the samples of a batch: its output of one sample depends on the states "
                f"of others (relative size {self.mixing[call.layer]:.1e}). Its Jacobians would depend on the rest of the batch; "
                "give the samples one at a time"
            )

    def require_values(self, l: int) -> None:
        """Raise UsageError if block l of the model gives another output than the recorded one."""
        if l not in self.wrong:
            return
        raise UsageError(
            f"block {l} ({self.model.calls[l - 1].name}): from the same state, the model computes another output than its copy "
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
        return BlocksNotFound(finding, chained(self.model.replica.description))


def _plain(t: Tensor) -> Tensor:
    return t.detach().cpu().double()


def _norm(rows: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)


def _ratio(
    part: Float[Tensor, "*rows d"], whole: Float[Tensor, "*rows d"]
) -> Float[Tensor, "*rows"]:
    return _norm(part) / _norm(whole).clamp_min(torch.finfo(torch.float64).tiny)
