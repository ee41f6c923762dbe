"""Ask the caller's own model whether the Jacobians that were formed are those of its blocks.

What forms a Jacobian replays recorded calls of blocks in the replica, with their other arguments held. It can't see what the
replica does not run as the model does, nor that a block's state reaches it by another way than its first argument, nor that
samples depend on each other. So the model itself is run, cut at the boundaries of its blocks (`cut_model`), and asked
(`questions`) about each block at one row of each sample, about its values at all rows: whether from the recorded state it gives
the recorded output; for J^T u and J v, which are compared with products of the Jacobian that was formed, at rows that are
measured (`Witness.judge`); and whether samples depend on each other, by derivatives or by a limited capacity.

If a block disagrees in J v, it is asked again with its state alone moved, which leaves what earlier blocks give to it (keys,
the first state) as it was, by +- h v and with several h: differences convict only if two steps agree. If it disagrees in J^T u,
both are compared with a copy in float64, and with what roundings change in copies.

Cost: one pass with gradients and three without, of all samples if they are small, else of two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tracker.common.errors import UsageError
from tracker.common.values import Witness as Asked
from tracker.devices import is_allocation_failure, raise_device_errors
from tracker.jacobians.cut_model import CutModel, model_bytes, why_not
from tracker.jacobians.judge import (
    BOUNDS,
    CLOSER,
    FIRST,
    ROUNDINGS,
    Verdict,
    judge,
    norm,
    step,
)
from tracker.jacobians.questions import (
    Backward,
    Disturbance,
    Question,
    ask_backward,
    ask_crowded,
    ask_moved,
)
from tracker.jacobians.slicing import Rows
from tracker.linalg.precision import EPSILON
from tracker.linalg.transfer import SEED, to_device
from tracker.model.inputs import Batch
from tracker.model.proposals import BlocksNotFound, chained
from tracker.model.recording import BlockCall, Recording
from tracker.model.replica import Replica
from tracker.provenance import digest

ROWS = 3  # that are tried where values differ
MOST_HIDDEN = 0.01  # of J^T u, that the rounding of u + J^T u may hide where no copy is finer
MOVES = 4  # passes in which all blocks are moved by roundings, in different directions
TINY = torch.finfo(torch.float64).tiny  # in place of a norm of 0


@dataclass
class Answer(Backward):
    """What the model says of one block at a row of each sample."""

    tokens: Sequence[int]
    v: Float[Tensor, "B d"]
    right: Bool[Tensor, " B"]  # whether the output is the recorded one
    # Of the second half of the samples: d(block) / dx v, from y and a state that is moved by the first step; None for numbers
    # of two bytes
    difference: Any = None

    @property
    def first_step(self) -> Float[Tensor, "B 1"]:
        """The step of v that is tried alone."""
        return step(self.x, BOUNDS[self.bytes].steps[FIRST])


@dataclass
class Findings:
    """What the model said of all calls of a measurement.

    Attributes:
        errors: the largest.
        undecided: layers whose differences do not converge.
        unsteady: layers whose J^T u differs by what rounding explains, and by how much.
        unasked: why the replica was asked in place of the model.
    """

    errors: dict[str, float] = field(
        default_factory=lambda: {"values": 0.0, "derivative": 0.0, "differences": 0.0}
    )
    undecided: set[int] = field(default_factory=set)
    unsteady: dict[int, float] = field(default_factory=dict)
    unasked: str = ""

    def note(self, name: str, error: float) -> None:
        """Keep the largest error of a name."""
        self.errors[name] = max(self.errors[name], error)

    def __str__(self) -> str:
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
        gradients: whether Jacobians are formed; else the values alone are compared.
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
        gradients: bool = True,
    ) -> None:
        self.answers: dict[int, Answer] = {}  # by layer
        # Layers whose values differ from the recorded ones, and by how much
        self.wrong: dict[int, float] = {}
        # Layers whose samples depend on each other, and by how much
        self.mixing: dict[int, float] = {}
        # Other weights have other states, and are asked about other rows: by digits that all processors agree in.
        last = recording.calls[-1].y[:1, :1]
        self.seed = SEED + int(digest([last.bfloat16().float().cpu()])[:8], 16)
        self.rows, self.valid = rows, valid
        self.findings = findings
        self._in_dtype = partial(CutModel, replica, batch, recording)
        # Else all ranks must run as many passes
        self._repeats = not replica.waits
        # By dtype and number of the pass
        self._of_copies: dict[tuple[torch.dtype, int], dict[int, Backward]] = {}
        failure = None
        unasked = "the caller turned it off" if asked == "off" else why_not(replica)
        if not unasked:
            # Numbers of two bytes say little of derivatives.
            coarse = model_bytes(replica) == 2 < replica.dtype.itemsize
            failure = self._ask(self._in_dtype(), gradients and not coarse)
            if coarse and gradients and failure is None:
                wrong = self.wrong
                failure = self._ask(self._in_dtype(replica.dtype), gradients)
                self.wrong |= wrong
        if unasked or failure is not None:
            findings.unasked = unasked or _first_line(failure)
            failure = None  # with the tensors that its traceback holds
            failure = self._ask(self._in_dtype(replica.dtype), gradients)
            if failure is not None:
                raise self._failed(failure)

    def _ask(self, model: CutModel, gradients: bool) -> Exception | None:
        """Ask about all blocks, with gradients or about values alone; return what made that fail, if it did."""
        self.model, self.answers, self.wrong, self.mixing = model, {}, {}, {}
        self.generator = torch.Generator().manual_seed(self.seed)
        model.choose(int(torch.randint(len(self.valid), (), generator=self.generator)))
        return _failing(partial(self._ask_model, gradients))

    def _failed(self, failure: Exception) -> UsageError:
        """Return the error for a model that can't be asked, nor its copy."""
        running = max(self.model.ended, 0)
        error = UsageError(
            f"block {running + 1} ({self.model.calls[running].name}) can't be asked whether it computes what was recorded: run "
            f"again from the recorded states, its code, or what runs before it, raises {_first_line(failure)}"
        )
        error.__cause__ = failure
        return error

    # Asking.

    def _ask_model(self, gradients: bool) -> None:
        self._ask_for_answers(gradients)
        for _ in range(ROWS - 1):
            # A model in 16 bits may choose another expert than the replica, at these rows
            if self._repeats and any(self.answers[l].bytes == 2 for l in self.wrong):
                self._ask_for_answers(gradients)
        # What the model computes may depend on the size of the batch
        if self.wrong and self.model.divided and self._repeats:
            self.model.choose_all()
            self._ask_for_answers(gradients)
        self._of_copies = {}
        self._explain_values()
        if gradients:
            answers = self.answers.items()
            fine = {l: a.first_step * a.v for l, a in answers if BOUNDS[a.bytes].steps}
            B = len(self.model.asked)
            if B > 1 and self._repeats:
                # A row may pass before all others, or after them.
                for sample in {B // 2, B - 1}:
                    self._ask_crowded(sample)
            for l, ahead in ask_moved(self.model, self._tokens, fine).items():
                answer = self.answers[l]
                half = len(answer.y) // 2
                answer.difference = (ahead - answer.y[half:]) / answer.first_step[half:]

    def _ask_for_answers(self, gradients: bool) -> None:
        """Ask for the values, and for J^T u of each block at a row of each sample, drawn for each block, in one pass."""
        L, d, asked = self.model.L, self.model.calls[0].x.shape[-1], self.model.asked
        tokens = [self._draw_token(sample, L) for sample in asked]
        u, v = torch.randn(2, L, len(asked), d, generator=self.generator, dtype=torch.float64)
        questions = {l: Question([of[l - 1] for of in tokens], u[l - 1]) for l in range(1, L + 1)}
        found = ask_backward(self.model, questions, gradients)
        again, self.wrong = self.wrong or questions, {}
        for l in again:
            row, at = found[l], questions[l].tokens
            right, error = self.compare_values(row.values, row.bytes, at)
            self.answers[l] = Answer(**vars(row), tokens=at, v=v[l - 1], right=right)
            if row.leak > BOUNDS[row.bytes].exact:
                self.mixing[l] = float(row.leak)
            if right.any():
                self.findings.note("values", error)
            else:
                self.wrong[l] = error

    @property
    def moving(self) -> set[int]:
        """The layers whose attention has a mask that depends on the state."""
        return {l for l, answer in self.answers.items() if answer.moving}

    @property
    def _tokens(self) -> dict[int, Sequence[int]]:
        return {l: answer.tokens for l, answer in self.answers.items()}

    def _explain_values(self) -> None:
        """Accept values that differ by no more than roundings change them."""
        for l in list(self.wrong):
            answer = self.answers[l]
            if answer.bytes > 2:
                changed = self._rounded_values(l)
                right, _ = self.compare_values(answer.values, answer.bytes, answer.tokens, changed)
                if right.any():
                    answer.right = right
                    self.findings.unsteady[l] = self.wrong.pop(l)

    def _draw_token(self, sample: int, count: int) -> list[int]:
        """Draw tokens of a sample among those that are measured."""
        tokens = self.rows.token[self.rows.sample == sample].tolist() or [self.valid[sample][-1]]
        drawn = torch.randint(len(tokens), (count,), generator=self.generator)
        return [tokens[i] for i in drawn.tolist()]

    def compare_values(
        self,
        values: Float[Tensor, "3 B n"],
        least: int,
        tokens: Sequence[int],
        changed: Tensor | float = 0.0,
    ) -> tuple[Bool[Tensor, " B"], float]:
        """Return whether a block's f is the recorded one at each sample's row, and the largest error, relative to f.

        Numbers of two bytes are compared at the rows alone: a router may choose another expert at others. The others are compared
        at all rows; if one differs, none is right.

        Args:
            changed: how much roundings change it.
        """
        compared = torch.zeros(values.shape[1:], dtype=torch.bool)
        for b, sample in enumerate(self.model.asked):
            compared[b, self.valid[sample] if least > 2 else tokens[b]] = True
        error, of_f, of_y = values
        of_f = of_f.clamp_min(TINY)
        allowed = BOUNDS[least].exact * of_f + ROUNDINGS * EPSILON[least] * of_y + CLOSER * changed
        right = ((error <= allowed) | ~compared).all(-1)
        if least > 2:
            right &= right.all()
        return right, float((error / of_f)[compared].max())

    def _of_copy(self, dtype: torch.dtype, moved: int = 0) -> dict[int, Backward]:
        """Return what a copy of the model says to the same questions; nothing if its code fails.

        Args:
            dtype: of the copy.
            moved: 0, or the number of a pass in which states, u and weights are moved by roundings.
        """
        if not self._repeats:
            return {}
        if (dtype, moved) not in self._of_copies:
            copy, found = self._copy_in(dtype), {}
            questions = {l: Question(answer.tokens, answer.u) for l, answer in self.answers.items()}
            bytes = {l: answer.bytes for l, answer in self.answers.items()}
            disturbance = Disturbance(bytes, self.generator) if moved else None
            _failing(lambda: found.update(ask_backward(copy, questions, disturbance=disturbance)))
            self._of_copies[dtype, moved] = found
        return self._of_copies[dtype, moved]

    def _copy_in(self, dtype: torch.dtype) -> CutModel:
        copy = self._in_dtype(dtype)
        copy.samples, copy.batch = self.model.samples, self.model.batch
        return copy

    @property
    def _own(self) -> torch.dtype:
        """The dtype that the model computes in."""
        coarse = model_bytes(self.model.replica) <= 4
        return self.model.dtype or (torch.float32 if coarse else torch.float64)

    def _rounding(
        self, l: int, part: Callable[[Backward], Tensor], none: Tensor
    ) -> Float[Tensor, "*rows"]:
        """Return the largest of a part of what copies, moved by roundings of the model's dtype, answer about a block."""
        found = [of[l] for k in range(MOVES) if (of := self._of_copy(self._own, 1 + k))]
        # Nothing is explained if its code fails.
        return torch.stack([part(of) for of in found]).amax(0) if found else none

    def _rounded_values(self, l: int) -> Float[Tensor, "*rows"]:
        """Return how much roundings change f at each row of a block."""
        return self._rounding(l, lambda of: of.values[0], torch.zeros(()))

    def _rounded_gradient(self, l: int) -> Float[Tensor, " B"]:
        """Return how far roundings take the model's J^T u of a block from its true value."""
        true = self._of_copy(torch.float64).get(l, self.answers[l]).JTu
        return self._rounding(l, lambda of: norm(of.JTu - true), torch.zeros(len(true)))

    def _ask_crowded(self, sample: int) -> None:
        """Find blocks in which outputs of samples change if the states of the others are near copies of a row of this sample."""
        found = ask_crowded(self.model, self._tokens, sample, self.generator)
        for l, values in found.items():
            answer = self.answers[l]
            right, error = self.compare_values(values, answer.bytes, answer.tokens)
            if not right.all() and l not in self.wrong:
                changed = self._rounded_values(l)
                right, _ = self.compare_values(values, answer.bytes, answer.tokens, changed)
            if not right.all() and l not in self.wrong:
                self.mixing.setdefault(l, error)

    # Judging.

    def products(
        self, call: BlockCall, rows: Rows, J: Float[Tensor, "R d d"]
    ) -> tuple[Tensor, Tensor, Float[Tensor, "2 r d"]] | None:
        """Return J^T u and J v at rows that the model was asked about; None if it was not asked about any.

        Before them, on the CPU: the samples, among those of `Answer`, and which rows they are.
        """
        answer = self.answers.get(call.layer)
        is_of = call is self.model.calls[call.layer - 1] and rows.source is None
        if answer is None or not is_of:
            return None
        samples, tokens = torch.tensor(self.model.asked), torch.tensor(answer.tokens)
        same = (rows.sample == samples[:, None]) & (rows.token == tokens[:, None])
        asked, at = (same & answer.right[:, None]).nonzero(as_tuple=True)
        if not len(asked):
            return None
        given = torch.stack([answer.u, answer.v])[:, asked].to(J.dtype)
        there, (u, v) = to_device(J.device, at, given)
        J = J[there]
        return asked, at, torch.stack([(u[:, None] @ J)[:, 0], (J @ v[..., None])[..., 0]])

    def judge(
        self,
        call: BlockCall,
        asked: Tensor,
        products: Float[Tensor, "2 r d"],
        bytes: int,
        rounding: Callable[[], float],
        *,
        exact: bool,
        differences: bool,
    ) -> None:
        """Compare Jacobians of a call at some rows, without the identity, with what the model says.

        Args:
            asked: the samples of the rows.
            products: of the Jacobians, in float64 on the CPU.
            bytes: of the numbers of the Jacobians.
            rounding: returns how far roundings take J^T u from its true value, relative to it.
            exact: whether J was formed in the precision of its dtype.
            differences: whether J is meant to be the derivative of the values.

        Raises:
            UsageError: if they differ.
        """
        answer, (JTu, Jv) = self.answers[call.layer], products
        least = min(answer.bytes, bytes)
        exactly = BOUNDS[least if exact else 2]
        if call.layer == 1:
            self._require_no_way_beside(call, answer, norm(JTu).max())
        self._judge_gradient(call, answer, asked, JTu, exactly.exact, least, rounding)
        half = len(answer.y) // 2
        if answer.difference is not None and differences and (asked >= half).any():
            later = asked >= half
            self._judge_differences(
                call, answer, asked[later], Jv[later], exactly.differences, rounding
            )

    def _judge_gradient(
        self,
        call: BlockCall,
        answer: Answer,
        asked: Tensor,
        JTu: Float[Tensor, "r d"],
        allowed: float,
        least: int,
        rounding_of_J: Callable[[], float],
    ) -> None:
        """Judge products J^T u at the rows of some samples."""
        l = call.layer
        rounding = ROUNDINGS * EPSILON[least] * _ratio(answer.u[asked], JTu)
        errors = _ratio(answer.JTu[asked] - JTu, JTu)
        error = float(errors.max())
        # Else the sum u + J^T u hides J^T u.
        hidden = not (rounding <= allowed).all()
        agrees = bool((errors <= allowed + rounding).all())
        finer = {} if agrees and not hidden else self._of_copy(torch.float64)
        if agrees and l not in finer and (not hidden or error <= allowed):
            self.findings.note("derivative", error)
            return
        if agrees and l not in finer and (rounding <= MOST_HIDDEN).all():
            self.findings.unsteady[l] = error
            return
        if self._repeats:
            # Its code may need another dtype than float64
            true = finer.get(l, answer).JTu[asked]
            of_J, of_model = _ratio(true - JTu, JTu), _ratio(answer.JTu[asked] - true, JTu)
            # Nothing is finer than the copy: its sum u + J^T u rounds, too.
            allowed_J = allowed + CLOSER * EPSILON[8] * _ratio(answer.u[asked], JTu)
            allowed_model = allowed + rounding
            J_agrees, model_agrees = (of_J <= allowed_J).all(), (of_model <= allowed_model).all()
            if J_agrees and model_agrees:
                self.findings.note("derivative", float(of_J.max()))
                return
            if not J_agrees:
                allowed_J = allowed_J + CLOSER * rounding_of_J()
            if not model_agrees:
                of_rows = self._rounded_gradient(l)[asked] / norm(JTu).clamp_min(TINY)
                # Few draws find what roundings change most in each row.
                allowed_model = allowed_model + CLOSER * of_rows.max()
            if (of_J <= allowed_J).all() and (of_model <= allowed_model).all():
                self.findings.unsteady[l] = error
                return
            error = max(error, float(of_J.max()))
        # Also where it is NaN
        raise self._other_derivative(call, f"J^T u by its backward pass differs by {error:.1e}")

    def _require_no_way_beside(self, call: BlockCall, answer: Answer, JTu: Tensor) -> None:
        """Raise UsageError if block 1 alone depends on what the model computed from its state before it began.

        That which later blocks depend on, too, such as the first state itself, is a constant by convention.
        """
        most = BOUNDS[answer.bytes].exact * JTu
        later = any(
            bool((other.beside > BOUNDS[other.bytes].exact * norm(other.JTu)).any())
            for l, other in self.answers.items()
            if l > 1
        )
        beside = answer.beside.max()
        if beside > most and not later and not self.model.replica.description.fixed:
            part = float(beside / JTu.clamp_min(TINY))
            raise self._other_derivative(
                call,
                f"J^T u of what the model computed from the state before the block began is {part:.1e}",
            )

    def _judge_differences(
        self,
        call: BlockCall,
        answer: Answer,
        asked: Tensor,
        Jv: Float[Tensor, "r d"],
        allowed: float,
        rounding_of_J: Callable[[], float],
    ) -> None:
        """Judge products J v at the rows of some samples of the second half."""
        l, half = call.layer, len(answer.y) // 2
        rows = asked - half
        x, y, v = answer.x[asked], answer.y[asked], answer.v[asked]

        def error(difference: Tensor) -> Tensor:
            return _ratio(difference - v - Jv, Jv)

        found = error(answer.difference[rows])
        rounding = ROUNDINGS * EPSILON[answer.bytes] * (norm(x) + norm(y))
        rounding /= norm(Jv * answer.first_step[asked]).clamp_min(TINY)
        # Else J v, which may be 0, is no measure of an error.
        seen = rounding <= allowed
        if (found <= allowed + rounding).all():
            self.findings.note("differences", float(found.where(seen, 0.0).max()))
            return
        if not self._repeats:
            self.findings.undecided.add(l)
            return

        def by_values(model: CutModel, precision: int) -> Verdict:
            """Judge with the state of this block alone moved, which leaves what earlier blocks give to it as it was."""

            def f(points: Tensor) -> Tensor:
                moves = torch.zeros_like(answer.x)
                moves[asked] = points - x
                return ask_moved(model, self._tokens, {l: moves})[l][rows]

            own = y if model is self.model else f(x)
            size = lambda _: norm(Jv).clamp_min(TINY)  # noqa: E731
            return judge(f, x, own, v, error, size, precision, allowed)

        verdict = by_values(self.model, answer.bytes)
        finer = {} if verdict.agree.all() else self._of_copy(torch.float64)
        if l in finer and finer[l].bytes > answer.bytes:
            verdict = by_values(self._copy_in(torch.float64), finer[l].bytes)
        if verdict.agree.all():
            self.findings.note("differences", float(verdict.error.where(seen, 0.0).max()))
            return
        if verdict.refuted.any():
            largest = float(verdict.error[verdict.refuted].max())
            if not largest <= CLOSER * rounding_of_J():
                raise self._other_derivative(
                    call, f"J v by differences of its values differs by {largest:.1e}"
                )
        self.findings.undecided.add(l)

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

    def _other_derivative(self, call: BlockCall, difference: str) -> BlocksNotFound:
        finding = (
            f"block {call.layer} ({call.name}): the Jacobian of its call is not the derivative of what the model computes there: "
            f"{difference} (relative). The state reaches the block's output by another way than the block's first argument, such "
            "as another argument that is the state or is computed from it, or an attribute that the model sets; or the block's "
            "code depends on the batch."
        )
        return BlocksNotFound(finding, chained(self.model.replica.description))


def _failing(run: Callable[[], None]) -> Exception | None:
    """Run passes of a model; return what made them fail, if they did."""
    try:
        run()
    # Of the model's code, whatever it is: it may need what is not installed here
    except Exception as error:
        if isinstance(error, UsageError):
            raise
        if not is_allocation_failure(error):
            raise_device_errors(error)
        return error
    return None


def _first_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _ratio(
    part: Float[Tensor, "*rows d"], whole: Float[Tensor, "*rows d"]
) -> Float[Tensor, "*rows"]:
    return norm(part) / norm(whole).clamp_min(TINY)
