"""What the model's answers are, against its derivatives, and what of an error is allowed, with errors planted in known places."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.central_differences import by_differences
from tests.jacobians.measured import CPU
from tests.jacobians.test_witness import IDS, Block, D, GateOfTheFirst, Mixing, Model
from tracker.blocks.find import find_blocks
from tracker.common.errors import UsageError
from tracker.jacobians.slicing import Rows
from tracker.jacobians.witness import (
    DERIVATIVE,
    DIFFERENCES,
    FIRST,
    ROUNDINGS,
    STEPS,
    VALUES,
    Witness,
    _Passes,
)
from tracker.linalg.precision import EPSILON
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import batches
from tracker.model.recorder import record
from tracker.model.replica import Replica

N = IDS.shape[1]


def asked(
    make=Model, dtype=torch.float64, samples=(0, 1, 2), tokens=(2, 4, N - 1), ids=IDS, blocks=None
):
    """Return a witness that has asked a model, and the model."""
    torch.manual_seed(0)
    model = make().eval().to(dtype)
    replica = Replica(model, find_blocks(model, blocks), dtype, CPU)
    (batch,) = batches(model, ids, None, None)
    recording = record(replica, batch.arguments, batch.keywords)
    rows = Rows(
        *(
            one.flatten()
            for one in torch.meshgrid(torch.tensor(samples), torch.tensor(tokens), indexing="ij")
        )
    )
    witness = Witness(replica, batch, recording, rows, [range(N)] * len(ids))
    assert not witness.unasked and not witness.failed
    return witness, model


@pytest.fixture(scope="module", autouse=True)
def quiet():
    with preserve_global_state(CPU):
        yield


@pytest.fixture(scope="module")
def found():
    return asked()


def jacobian(witness, model, l):
    """Return J - I of block l at the row that was asked about."""
    at = (witness.sample, witness.answers[l].token)
    return by_differences(partial(model.step, l - 1), witness.passes.calls[l - 1].x, at)


def judged(witness, l, J, gradients=True, differences=True, exact=True, token=None):
    """Judge one Jacobian of block l, beside those of other rows, which are wrong."""
    answer = witness.answers[l]
    token = answer.token if token is None else token
    others = [(witness.sample, (token + 1) % N), ((witness.sample + 1) % 3, token)]
    rows = Rows(
        *(torch.tensor(index) for index in zip(*others, (witness.sample, token), strict=True))
    )
    wrong = torch.eye(D, dtype=J.dtype)
    options = {"gradients": gradients, "differences": differences, "exact": exact}
    witness.judge(witness.passes.calls[l - 1], rows, torch.stack([wrong, wrong, J]), **options)


def test_answers_are_the_derivatives_of_the_model(found):
    witness, model = found
    assert [*witness.answers] == [1, 2, 3] and not witness.wrong
    for l, answer in witness.answers.items():
        J, call = jacobian(witness, model, l), witness.passes.calls[l - 1]
        x, y = (state[witness.sample, answer.token] for state in (call.x, call.y))
        torch.testing.assert_close(answer.gradient, answer.u + J.T @ answer.u, atol=1e-7, rtol=0)
        torch.testing.assert_close(answer.y, y)
        assert answer.bytes == 8 and answer.token in (2, 4, N - 1)
        assert answer.size == pytest.approx(float(x.norm()))
        assert answer.growth == pytest.approx(float(y.norm() / x.norm()))
        for step, h in enumerate(STEPS[8]):
            assert answer.step(step) * answer.v.norm() == pytest.approx(h * answer.size)
            ahead, behind = witness._differences_alone(l, step)
            expected = answer.v + J @ answer.v
            torch.testing.assert_close((ahead + behind) / 2, expected, atol=1e-4, rtol=0)
            assert (ahead - behind).norm() < 100 * h * expected.norm()
        # Of one step ahead, whose error is of the first order
        error = (answer.difference - answer.v - J @ answer.v).norm() / (J @ answer.v).norm()
        assert error < 1e-3
    vectors = torch.stack(
        [of for answer in witness.answers.values() for of in (answer.u, answer.v)]
    )
    assert (torch.corrcoef(vectors).fill_diagonal_(0).abs() < 0.9).all()  # different ones


def test_other_weights_are_asked_about_other_rows():
    places = set()
    for i in range(8):
        witness, _ = asked(lambda i=i: (torch.manual_seed(i), Model())[1])
        places.add((witness.sample, *(answer.token for answer in witness.answers.values())))
    again, _ = asked(lambda: (torch.manual_seed(7), Model())[1])
    assert len(places) > 4
    assert (again.sample, *(answer.token for answer in again.answers.values())) in places


@pytest.mark.parametrize("l", [1, 2, 3])
def test_a_true_jacobian_agrees_and_its_errors_are_kept(found, l):
    witness, model = found
    witness.errors = dict.fromkeys(witness.errors, 0.0)
    answer, J = witness.answers[l], jacobian(witness, model, l)
    judged(witness, l, J)
    exact = dict(witness.errors)
    assert exact["derivative"] < 1e-7 and 1e-9 < exact["differences"] < DIFFERENCES[8]
    judged(witness, l, J + 1e-6 * J)
    off = (1e-6 * J.T @ answer.u).norm() / (J.T @ answer.u).norm()
    assert witness.errors["derivative"] == pytest.approx(float(off), rel=0.1)
    judged(witness, l, J)  # the largest errors are kept
    assert witness.errors["derivative"] == pytest.approx(float(off), rel=0.1)
    witness.errors = dict.fromkeys(witness.errors, 0.0)
    judged(witness, l, J, gradients=False, differences=False)
    assert not any(witness.errors.values())


@pytest.mark.parametrize("l", [1, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_off_by_more_than_is_allowed_is_refused(found, l, exact):
    """J^T u and J v are compared alone as well; products of formed Jacobians in TF32 may be off by more."""
    witness, model = found
    answer, J = witness.answers[l], jacobian(witness, model, l)
    u, v = (one / one.norm() for one in (answer.u, answer.v))
    of_gradient = DERIVATIVE[8 if exact else 2]
    of_differences = DIFFERENCES[8] if exact else DERIVATIVE[2]
    for share, refused in ((0.5, False), (2.5, True)):
        # Without an effect on J v, and without one on J^T u
        left, right = (one / one.norm() for one in (J.T @ u, J @ v))
        left, right = left - (left @ v) * v, right - (right @ u) * u
        changes = {
            "J\\^T u by its backward pass": (of_gradient * (J.T @ u).norm(), torch.outer(u, left)),
            "J v by differences": (of_differences * (J @ v).norm(), torch.outer(right, v)),
        }
        for (name, (size, change)), of in zip(
            changes.items(), ({"differences": False}, {"gradients": False}), strict=True
        ):
            change = change / change.norm() * size * share
            if refused:
                with pytest.raises(UsageError, match=f"{name}"):
                    judged(witness, l, J + change, exact=exact, **of)
                with pytest.raises(UsageError, match=f"{name}"):
                    judged(witness, l, J + change, exact=exact)
                other = {"gradients": False} if "gradients" not in of else {"differences": False}
                judged(witness, l, J + change, exact=exact, **other)
            else:
                judged(witness, l, J + change, exact=exact)


DIFFER = {  # what differences of the three steps are beside the true one, and whether that refuses the block
    "all alike": ((1.0, 1.0, 1.0), True),
    "the first two alike": ((1.0, 1.0, 9.0), True),
    "the last two alike": ((9.0, 1.0, 1.0), True),
    "nearly alike": ((1.0, 1.25, 4.0), True),
    "hardly alike": ((1.0, 1.5, 4.0), False),
    "none alike": ((1.0, 2.0, 4.0), False),
}


def assert_refused_or_undecided(witness, J, refused, monkeypatch):
    """Assert that differences which J v does not agree with refuse block 2, or leave it undecided."""
    monkeypatch.setattr(witness, "undecided", [])
    if refused:
        with pytest.raises(UsageError, match="J v by differences of its values differs by"):
            judged(witness, 2, J)
    else:
        judged(witness, 2, J)
    assert witness.undecided == ([] if refused else [2])


@pytest.mark.parametrize("what", DIFFER)
def test_differences_convict_only_if_two_steps_agree(found, what, monkeypatch):
    witness, model = found
    shares, refused = DIFFER[what]
    answer, J = witness.answers[2], jacobian(witness, model, 2)
    true = answer.v + J @ answer.v
    off = answer.u * (J @ answer.v).norm() / answer.u.norm()
    given = lambda l, step: (true + shares[step] * off,) * 2  # noqa: E731
    monkeypatch.setattr(witness, "_differences_alone", given)
    monkeypatch.setattr(answer, "difference", true + 9 * off)
    assert_refused_or_undecided(witness, J, refused, monkeypatch)


@pytest.mark.parametrize("right", [0, 1, 2])
def test_one_step_that_agrees_is_enough(found, right, monkeypatch):
    witness, model = found
    answer, J = witness.answers[2], jacobian(witness, model, 2)
    true, steps = answer.v + J @ answer.v, []

    def given(l, step):
        steps.append(step)
        return (true if step == right else 0 * true,) * 2

    monkeypatch.setattr(witness, "_differences_alone", given)
    monkeypatch.setattr(answer, "difference", 0 * true)
    monkeypatch.setattr(witness, "errors", dict.fromkeys(witness.errors, 0.0))
    judged(witness, 2, J)
    assert steps == {1: [1], 0: [1, 0], 2: [1, 0, 2]}[right] and not witness.undecided
    assert witness.errors["differences"] < 1e-9


@pytest.mark.parametrize("side", [0, 1])
def test_a_difference_to_one_side_is_enough(found, side, monkeypatch):
    """As at a kink: central differences of any step are the mean of two derivatives, and J is one of them."""
    witness, model = found
    answer, J = witness.answers[2], jacobian(witness, model, 2)
    true = answer.v + J @ answer.v
    off = answer.u * (J @ answer.v).norm() / answer.u.norm()
    sides = [true + 2 * off] * 2
    sides[side] = true
    monkeypatch.setattr(witness, "_differences_alone", lambda l, step: sides)
    monkeypatch.setattr(answer, "difference", true + 2 * off)
    monkeypatch.setattr(witness, "errors", dict.fromkeys(witness.errors, 0.0))
    judged(witness, 2, J)
    assert not witness.undecided and witness.errors["differences"] < 1e-9


@pytest.mark.parametrize(("apart", "refused"), [(1.1, False), (0.9, True)])
def test_a_fault_is_larger_than_a_kink(found, apart, refused, monkeypatch):
    """The differences to both sides are `apart` times as far from each other as J v is from their mean, and all steps agree."""
    witness, model = found
    answer, J = witness.answers[2], jacobian(witness, model, 2)
    true = answer.v + J @ answer.v
    off = answer.u * (J @ answer.v).norm() / answer.u.norm()
    across = answer.v.flip(0) - answer.v.flip(0) @ off / (off @ off) * off
    across = across * off.norm() / across.norm()
    sides = [true + off + sign * apart / 2 * across for sign in (1, -1)]
    monkeypatch.setattr(witness, "_differences_alone", lambda l, step: sides)
    monkeypatch.setattr(answer, "difference", true + off)
    assert_refused_or_undecided(witness, J, refused, monkeypatch)


class SecondBlock(Block):
    def f(self, x):
        return super().f(x).bfloat16().to(x)


def rounding_second():
    model = Model()
    model.blocks[1].__class__ = SecondBlock
    return model


def test_the_numbers_that_a_block_computes_with():
    witness, _ = asked(rounding_second, torch.float32)
    assert [answer.bytes for answer in witness.answers.values()] == [4, 2, 4]
    assert [answer.difference is None for answer in witness.answers.values()] == [
        False,
        True,
        False,
    ]
    witness, _ = asked(dtype=torch.bfloat16)
    assert {answer.bytes for answer in witness.answers.values()} == {2}


class OfStates(Model):
    """A model of one block, whose input is the first state."""

    def __init__(self):
        super().__init__(depth=1)

    def forward(self, x):
        return self.blocks[0](x)


def test_a_model_of_one_block():
    states = torch.randn(3, N, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.manual_seed(0)
    witness, model = asked(OfStates, ids=states, blocks=["blocks.0"])
    assert [*witness.answers] == [1] and witness.answers[1].beside == 0
    judged(witness, 1, jacobian(witness, model, 1))
    with pytest.raises(UsageError):
        judged(witness, 1, 1.1 * jacobian(witness, model, 1))


def test_what_can_not_be_judged_is_left(found):
    """Another call of the block, rows of other sources, and rows that were not asked about."""
    witness, model = found
    answer, call = witness.answers[2], witness.passes.calls[1]
    wrong = torch.eye(D, dtype=torch.float64)[None]
    at = torch.tensor([witness.sample]), torch.tensor([answer.token])
    options = {"gradients": True, "differences": True, "exact": True}
    with pytest.raises(UsageError):
        witness.judge(call, Rows(*at), wrong, **options)
    witness.judge(replace(call), Rows(*at), wrong, **options)
    witness.judge(call, Rows(*at, torch.tensor([0])), wrong, **options)
    witness.judge(call, Rows(at[0], (at[1] + 1) % N), wrong, **options)
    witness.judge(call, Rows((at[0] + 1) % 3, at[1]), wrong, **options)


def values(error, of_f, of_y, shape=(2, 4)):
    """Return errors, |f| and |y| at all rows."""
    return torch.stack([torch.full(shape, one).double() for one in (error, of_f, of_y)])


def test_value_errors():
    """Over the rows that are not padding; of numbers of two bytes, at the block's row alone."""
    passes = SimpleNamespace(samples=slice(1, 3), at=1)
    witness = SimpleNamespace(passes=passes, valid=[range(9), [0, 1, 2], [1, 2]])
    of = lambda *given: Witness._value_error(witness, *given)  # noqa: E731
    for size in (8, 4, 2):
        error, excess = of(values(1e-3, 2.0, 5.0), size, 2)
        allowed = VALUES[size] * 2 + ROUNDINGS * EPSILON[size] * 5
        assert error == pytest.approx(0.5e-3) and excess == pytest.approx(1e-3 / allowed)
        for b, t in ((0, 3), (1, 0), (1, 3), (0, 0), (1, 2)):
            given = values(0.0, 1.0, 1.0)
            given[0, b, t] = 1.0
            padding = (b, t) in ((0, 3), (1, 0), (1, 3))
            seen = (b, t) == (1, 2) or (size > 2 and not padding)
            error, excess = of(given, size, 2)
            assert (error, excess > 1) == ((1.0, True) if seen else (0.0, False))
    witness.passes = SimpleNamespace(samples=slice(None), at=1)
    error, _ = of(values(1.0, 0.0, 0.0, (3, 9)), 8, 2)
    assert error > 1e300 or error == float("inf")  # relative to f = 0
    given = values(0.0, 1.0, 1.0, (3, 9))
    given[0, 0, 8] = 1.0
    assert of(given, 8, 2)[0] == 1.0


def test_samples_that_run():
    """The one that is asked about and another, or all where the call does not divide."""
    ids = torch.arange(20).view(4, 5)
    model = Model().eval()
    (batch,) = batches(model, ids, None, None)
    replica = Replica(model, find_blocks(model), torch.float32, CPU)
    passes = _Passes(replica, batch, record(replica, batch.arguments, batch.keywords), False)
    assert not passes.divided and passes.at == 0
    for sample, at in enumerate([(0, 2, 0), (1, 3, 0), (2, 4, 0), (2, 4, 1)]):
        passes.choose(sample)
        first, last, place = at
        assert (passes.samples, passes.at, passes.divided) == (slice(first, last), place, True)
        assert torch.equal(passes.batch.arguments[0], ids[first:last])
        passes.choose_all(sample)
        assert (passes.at, passes.divided) == (sample, False)
        assert passes.batch is batch
    passes.whole = replace(batch, keywords={"other": torch.zeros(3)})
    passes.choose(3)
    assert (passes.at, passes.divided) == (3, False)


@pytest.mark.parametrize("make", [Mixing, GateOfTheFirst, Model])
def test_what_was_computed_from_the_first_state_beside_the_block(make):
    """By differences of the gate alone, at the row; a first state that later blocks are given too is a constant."""
    witness, model = asked(make)
    answer = witness.answers[1]
    if make is Model:
        assert all(answer.beside == 0 for answer in witness.answers.values())
        return
    x = witness.passes.calls[0].x
    block, row = model.blocks[0], (witness.sample, answer.token)
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        other = given if make is Mixing else (4 * model.outside[0](given)).sigmoid()
        product = block(x, other)[row] @ answer.u
        (gradient,) = torch.autograd.grad(product, given)
    assert answer.beside == pytest.approx(float(gradient[row].norm()))
    assert (witness.answers[2].beside > 0) == (make is Mixing)


@pytest.mark.parametrize(("of_later", "refused"), [(0.0, True), (1.0, False)])
def test_what_block_1_alone_takes_from_its_state_is_another_way(
    found, of_later, refused, monkeypatch
):
    """What the next block takes, too, is a constant, such as the first state that all blocks are given."""
    witness, model = found
    answer, J = witness.answers[1], jacobian(witness, model, 1)
    monkeypatch.setattr(answer, "beside", 0.25 * float((J.mT @ answer.u).norm()))
    monkeypatch.setattr(witness.answers[2], "beside", of_later)
    if refused:
        with pytest.raises(UsageError, match=r"before the block began is 2\.5e-01 \(relative\)"):
            judged(witness, 1, J)
    else:
        judged(witness, 1, J)


def test_a_step_of_a_state_of_zeros_is_that_of_length_one(found):
    answer = found[0].answers[1]
    assert replace(answer, size=0.0).step(FIRST) * answer.v.norm() == pytest.approx(STEPS[8][FIRST])
