"""What the model's answers are, against its derivatives by brute force, and which Jacobians do not agree with them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.asked import IDS, Block, D, Model
from tests.support.central_differences import by_differences
from tests.support.measured import CPU
from tests.support.refused import refused
from tracker.blocks.find import find_blocks
from tracker.jacobians import cut_model
from tracker.jacobians.judge import BOUNDS, ROUNDINGS
from tracker.jacobians.slicing import Rows
from tracker.jacobians.witness import Findings, Witness
from tracker.linalg.precision import EPSILON
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import batches
from tracker.model.recorder import record
from tracker.model.replica import Replica

B, N = IDS.shape
MEASURED = (2, 4, N - 1)


def asked(make=Model, dtype=torch.float64, ids=IDS):
    """Return a witness that has asked a model, and the model."""
    torch.manual_seed(0)
    model = make().eval().to(dtype)
    replica = Replica(model, find_blocks(model), dtype, CPU)
    (batch,) = batches(model, ids, None, None)
    recording = record(replica, batch.arguments, batch.keywords)
    rows = Rows(*torch.cartesian_prod(torch.arange(len(ids)), torch.tensor(MEASURED)).T)
    witness = Witness(replica, batch, recording, rows, [range(N)] * len(ids), Findings())
    assert not witness.findings.unasked
    return witness, model


@pytest.fixture(scope="module", autouse=True)
def quiet():
    with preserve_global_state(CPU):
        yield


@pytest.fixture(scope="module")
def found():
    return asked()


def jacobians(witness, model, l):
    """Return J - I of block l at the row of each sample that was asked about."""
    x, step = witness.model.calls[l - 1].x, partial(model.step, l - 1)
    at = enumerate(witness.answers[l].tokens)
    return torch.stack([by_differences(step, x, row) for row in at])


def judged(witness, l, J, differences=True, exact=True):
    """Judge the Jacobians of block l at the rows that were asked about, beside a wrong one of another row."""
    call, tokens = witness.model.calls[l - 1], torch.tensor(witness.answers[l].tokens)
    at = torch.arange(B + 1) % B, torch.cat([tokens, torch.tensor([0])])
    J = torch.cat([J, torch.eye(D, dtype=J.dtype)[None]])
    options = {"differences": differences, "exact": exact}
    asked, _, products = witness.products(call, Rows(*at), J)
    witness.judge(call, asked, products, J.itemsize, lambda: 0.0, **options)


def test_answers_are_the_derivatives_of_the_model(found):
    witness, model = found
    assert [*witness.answers] == [1, 2, 3] and not witness.wrong and not witness.mixing
    for l, answer in witness.answers.items():
        J, call = jacobians(witness, model, l), witness.model.calls[l - 1]
        samples, half = torch.arange(B), B // 2
        torch.testing.assert_close(
            answer.JTu, torch.einsum("bij,bi->bj", J, answer.u), atol=1e-7, rtol=0
        )
        torch.testing.assert_close(answer.y, call.y[samples, answer.tokens])
        torch.testing.assert_close(answer.x, call.x[samples, answer.tokens])
        assert answer.bytes == 8 and {*answer.tokens} <= {*MEASURED} and answer.right.all()
        # Of one step ahead, whose error is of the first order
        Jv = (J @ answer.v[..., None])[half:, :, 0]
        error = (answer.difference - answer.v[half:] - Jv).norm(dim=-1) / Jv.norm(dim=-1)
        assert (error < 1e-3).all()
    vectors = torch.cat([of for answer in witness.answers.values() for of in (answer.u, answer.v)])
    assert (torch.corrcoef(vectors).fill_diagonal_(0).abs() < 0.9).all()  # different ones


def test_other_weights_are_asked_about_other_rows():
    of_seed = lambda i: asked(lambda: (torch.manual_seed(i), Model())[1])[0].answers  # noqa: E731
    places = [tuple(tuple(answer.tokens) for answer in of_seed(i).values()) for i in (*range(8), 7)]
    assert len({*places}) > 4 and places[-1] == places[-2]


@pytest.mark.parametrize("l", [1, 2, 3])
def test_what_is_off_is_noted_and_refused_where_it_is_much(found, l, monkeypatch):
    """By each of both questions alone: the second error leaves J^T u as it is."""
    witness, model = found
    # Differences of the second order are off by 1e-9.
    right, answer = jacobians(witness, model, l), witness.answers[l]
    monkeypatch.setattr(witness, "findings", Findings())
    errors = witness.findings.errors
    for off, noted in ((0, 0), (1e-3, 1e-3), (0, 1e-3)):  # the largest is kept
        judged(witness, l, (1 + off) * right, exact=False)
        assert errors["derivative"] == pytest.approx(noted, rel=0.1, abs=1e-7)
    assert 0 < errors["differences"] < BOUNDS[2].exact
    wrong = right.clone()
    wrong[-1] *= 1 + 3 * BOUNDS[2].exact
    with refused("J\\^T u by its backward pass"):
        judged(witness, l, wrong, differences=False, exact=False)
    u, v, wrong = answer.u[-1], answer.v[-1], right.clone()
    change = right[-1] @ v
    change = change - (change @ u) / (u @ u) * u
    wrong[-1] += 3 * BOUNDS[2].exact * torch.outer(change, v) / (v @ v)
    with refused("J v by differences"):
        judged(witness, l, wrong, exact=False)
    judged(witness, l, wrong, differences=False, exact=False)


def test_what_can_not_be_judged_is_left(found):
    """Another call of the block, rows of other sources, and rows that were not asked about."""
    witness, _ = found
    call, tokens = witness.model.calls[1], torch.tensor(witness.answers[2].tokens)
    J = torch.eye(D, dtype=torch.float64).expand(B, -1, -1)
    samples = torch.arange(B)
    assert witness.products(call, Rows(samples, tokens), J) is not None
    sources = torch.zeros(B, dtype=torch.long)
    for other, rows in (
        (replace(call), Rows(samples, tokens)),
        (call, Rows(samples, tokens, sources)),
        (call, Rows(samples, (tokens + 1) % N)),
    ):
        assert witness.products(other, rows, J) is None


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


@pytest.mark.parametrize("size", [8, 4, 2])
def test_values_are_compared_where_there_is_no_padding(found, size, monkeypatch):
    """Of numbers of two bytes, at each sample's row alone."""
    witness, tokens = found[0], [2, 0, 1]
    monkeypatch.setattr(witness, "valid", [range(N), [0, 1, 2], [1, 2]])

    allowed = BOUNDS[size].exact + ROUNDINGS * EPSILON[size]
    for b, t in ((0, 2), (0, 4), (1, 0), (1, 3), (2, 0), (2, 1)):
        seen = t == tokens[b] if size == 2 else t in witness.valid[b]
        for times in (0.9, 1.1):
            values = torch.ones(3, B, N, dtype=torch.float64)
            values[0] = 0
            values[0, b, t] = times * allowed
            right, largest = witness.compare_values(values, size, tokens)
            assert largest == pytest.approx(seen * times * allowed)
            wrong = seen and times > 1
            assert right.tolist() == [not wrong or (size == 2 and other != b) for other in range(B)]


def test_samples_that_run(monkeypatch):
    """The one that is drawn and another where states are large, or all where the call does not divide."""
    ids = torch.arange(20).view(4, 5)
    model = Model().eval()
    (batch,) = batches(model, ids, None, None)
    replica = Replica(model, find_blocks(model), torch.float32, CPU)
    recording = record(replica, batch.arguments, batch.keywords)
    run = cut_model.CutModel(replica, batch, recording, None)
    run.choose(1)
    assert not run.divided and run.asked == range(4)
    monkeypatch.setattr(cut_model, "TOGETHER", 1)
    for sample, first in enumerate((0, 1, 2, 2)):
        run.choose(sample)
        assert run.divided and run.asked == range(first, first + 2)
        assert torch.equal(run.batch.arguments[0], ids[first : first + 2])
    run.choose_all()
    assert not run.divided and run.batch is batch
    run.whole = replace(batch, keywords={"other": torch.zeros(3)})
    run.choose(3)
    assert not run.divided
