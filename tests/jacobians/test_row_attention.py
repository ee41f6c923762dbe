"""The first-order expansion of one row's attention against autograd through the attention itself, in float64."""

from functools import partial

import pytest
import torch

from tracker.jacobians import row_attention
from tracker.jacobians.row_attention import HeadProduct, by_formula, by_own_code
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.model.attention import Formula, OriginalAttention
from tracker.model.recording import AttentionCall

H, n, e, f = 4, 6, 5, 7
FORMULAS = {
    "plain": Formula(),
    "scale": Formula(scale=0.7),
    "cap": Formula(cap=0.5),
    "all": Formula(0.3, 0.8, torch.linspace(-1, 1, H).double()),
}
SEEN = torch.tensor([[True, True, False, True]]).expand(4, 4)
MASKS = {"bool": SEEN, "of samples": SEEN[None, None], "added": torch.randn(1, H, 4, 4).double()}

close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)
jacobian = torch.autograd.functional.jacobian


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rows_of(G):
    """Return queries, keys and values of three rows of one recording and two of another."""
    return torch.randn(5, H, 1, e), torch.randn(5, G, 1, e), torch.randn(5, G, 1, f)


def recordings(G, mask=SEEN):
    """Return two recordings of other lengths and their rows: one causal, of two samples, and one whose only sample has a mask."""
    long = AttentionCall(torch.randn(2, G, n, e), torch.randn(2, G, n, f), None, True)
    short = AttentionCall(torch.randn(1, G, 4, e), torch.randn(1, G, 4, f), mask, False)
    source = torch.tensor([0, 3, 1])
    return [
        (long, Rows(torch.tensor([0, 1, 1]), torch.tensor([2, n - 1, 4]), source)),
        (short, Rows(torch.tensor([0, 0]), torch.tensor([3, 1]))),
    ]


@pytest.fixture
def live():
    return rows_of(2)


@pytest.fixture
def frozen():
    return recordings(2)


def own_code(formula, query, key, value, mask, causal):
    """A model's own attention: queries (R, H, 1, e) and keys (R, G, n, e)."""
    K, V = (kept.repeat_interleave(H // key.shape[1], dim=1) for kept in (key, value))
    s = query @ K.mT * (e**-0.5 if formula.scale is None else formula.scale)
    s = s if formula.cap is None else formula.cap * (s / formula.cap).tanh()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    sinks = (
        s[..., :0] if formula.sinks is None else formula.sinks[:, None, None].expand_as(s[..., :1])
    )
    return torch.cat([s, sinks], -1).softmax(-1)[..., : K.shape[2]] @ V


def by_hand(formula, query, key, value, frozen):
    """Return the attention of each row by itself, its live key and value written into copies of the frozen ones."""
    rows = [(past, rows.subset(slice(i, i + 1))) for past, rows in frozen for i in range(len(rows))]
    outputs = []
    for r, (past, row) in enumerate(rows):
        b, t, at = int(row.sample), int(row.token), int(row.live)
        K, V = past.key[b].clone(), past.value[b].clone()
        K[:, at], V[:, at] = key[r, :, 0], value[r, :, 0]
        seen = torch.arange(len(K[0])) <= t if past.mask is None else past.mask[..., t, None, :]
        outputs.append(own_code(formula, query[r : r + 1], K[None], V[None], seen, False))
    return torch.cat(outputs)


def asked(formula, *live, function=torch.add):
    """Return a model's own attention of live queries, keys and values."""
    return OriginalAttention(function, *live, None, False, formula)


@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_derivatives(G, formula, mask):
    """In reverse mode, in forward mode, and by reverse mode twice."""
    live, frozen, of = rows_of(G), recordings(G, MASKS[mask]), FORMULAS[formula]
    found, expected = (
        lambda *given: by_formula(asked(of, *given), frozen),
        lambda *given: by_hand(of, *given, frozen),
    )
    close(found(*live), expected(*live))
    J = jacobian(expected, live)
    for one, other in zip(jacobian(found, live), J, strict=True):
        close(one, other)
    v = tuple(torch.randn_like(given) for given in live)
    pushed = sum(torch.tensordot(one, t, dims=4) for one, t in zip(J, v, strict=True))
    close(torch.func.jvp(found, live, v)[1], pushed)
    close(torch.autograd.functional.jvp(found, live, v)[1], pushed)


@pytest.mark.parametrize("method", [by_formula, by_own_code])
@pytest.mark.parametrize("at_once", [0, 1200, 1 << 20])
def test_few_rows_at_a_time(method, at_once, live, frozen, monkeypatch):
    """One, or two of the first recording's three, or all; also without gradients."""
    monkeypatch.setattr(row_attention, "AT_ONCE", (at_once, at_once))
    formula = Formula(0.7)
    attention = partial(asked, formula, function=partial(own_code, formula))
    expected = jacobian(lambda *given: by_hand(formula, *given, frozen), live)
    found = jacobian(lambda *given: method(attention(*given), frozen), live)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    with torch.no_grad():
        close(method(attention(*live), frozen), by_hand(formula, *live, frozen))


def test_products_are_in_the_recorded_dtype(live, frozen):
    """Under autocast the live tensors may be of another, and products of float32 would be cast."""
    frozen = [
        (AttentionCall(past.key.float(), past.value.float(), past.mask, past.causal), rows)
        for past, rows in frozen
    ]
    rough = [given.bfloat16() for given in live]
    expected = by_hand(Formula(), *(given.float() for given in rough), frozen)
    with torch.autocast("cpu", torch.bfloat16):
        found = by_formula(asked(Formula(), *rough), frozen)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_without_a_formula_that_is_known(live, frozen):
    query, key, value = live
    three = key.repeat(1, 2, 1, 1)[:, :3], value.repeat(1, 2, 1, 1)[:, :3]
    for formula, given in ((None, (query, key, value)), (Formula(), (query, *three))):
        with pytest.raises(NotSliceable, match="the formula of its attention is not known"):
            by_formula(asked(formula, *given), frozen)


def test_only_what_is_asked_for_has_a_derivative(live, frozen):
    """Of a query alone, a key alone and a value alone, in both modes."""
    J = jacobian(lambda *given: by_hand(Formula(), *given, frozen), live)
    for i, x in enumerate(live):

        def of_one(x, i=i):
            return by_formula(asked(Formula(), *live[:i], x, *live[i + 1 :]), frozen)

        close(jacobian(of_one, x), J[i])
        v = torch.randn_like(x)
        close(torch.func.jvp(of_one, (x,), (v,))[1], torch.tensordot(J[i], v, dims=4))


def test_many_cotangents_are_folded_not_copied():
    x = torch.randn(6, 1, 5, requires_grad=True)
    M = torch.randn(6, 5, 3)
    u = torch.randn(100, 6, 1, 3)
    y = HeadProduct.apply(x, M)
    with torch.profiler.profile(record_shapes=True) as profile:
        seen = torch.vmap(lambda one: torch.autograd.grad(y, x, one, retain_graph=True)[0])(u)
    torch.testing.assert_close(seen, u @ M.mT)
    products = [event.input_shapes for event in profile.events() if event.name == "aten::bmm"]
    assert products == [[[6, 100, 3], [6, 3, 5]]]
