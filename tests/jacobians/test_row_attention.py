"""The first-order expansion of one row's attention against autograd through the attention itself, in float64."""

from functools import partial

import pytest
import torch

from tracker.jacobians import row_attention
from tracker.jacobians.row_attention import HeadProduct, by_formula, by_own_code, expand
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.model.attention import Formula, OriginalAttention
from tracker.model.recording import AttentionCall

R, H, n, e, f = 3, 4, 6, 5, 7


close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def attention(formula, query, key, value, K, V, own, mask):
    """Written out row by row, head by head."""
    G, out = key.shape[1], []
    for r in range(R):
        for h in range(H):
            g, at = h // (H // G), torch.arange(n) == own[r]
            keys = torch.where(at[:, None], key[r, g], K[r, g])
            values = torch.where(at[:, None], value[r, g], V[r, g])
            s = keys @ query[r, h, 0] * (e**-0.5 if formula.scale is None else formula.scale)
            s = s if formula.cap is None else formula.cap * torch.tanh(s / formula.cap)
            if mask is not None:
                row = mask[r, h % mask.shape[1], 0]
                s = s.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else s + row
            sink = torch.tensor([]) if formula.sinks is None else formula.sinks[h : h + 1]
            out.append(torch.cat([s, sink]).softmax(0)[:n] @ values)
    return torch.stack(out).view(R, H, 1, f)


@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize(
    "formula",
    [
        Formula(),
        Formula(scale=0.7),
        Formula(cap=0.5),
        Formula(0.3, 0.8, torch.linspace(-1, 1, H).double()),
    ],
    ids=["plain", "scale", "cap", "all"],
)
@pytest.mark.parametrize("masked", ["none", "bool", "added"])
def test_value_and_jacobian(double, formula, G, masked):
    shapes = (R, H, 1, e), (R, G, 1, e), (R, G, 1, f), (R, G, n, e), (R, G, n, f)
    query, key, value, K, V = (torch.randn(*shape) for shape in shapes)
    own = torch.tensor([0, 3, n - 1])
    mask = {
        "none": None,
        "bool": torch.rand(R, 1, 1, n) < 0.7,
        "added": torch.randn(R, H, 1, n),
    }[masked]
    if masked == "bool":
        mask[torch.arange(R), :, :, own] = True
    live = torch.zeros(R, 1, n, 1, dtype=torch.bool)
    live[torch.arange(R), :, own] = True
    expansion = expand(
        formula, query, torch.where(live, key, K), torch.where(live, value, V), mask, own
    )
    point = query, key, value
    by_hand = lambda *given: attention(formula, *given, K, V, own, mask)  # noqa: E731
    close(expansion(*point), by_hand(*point))
    seen, expected = (torch.autograd.functional.jacobian(g, point) for g in (expansion, by_hand))
    v = tuple(torch.randn_like(t) for t in point)
    pushed = sum(torch.tensordot(J, t, dims=4) for J, t in zip(expected, v, strict=True))
    for one, other in zip(seen, expected, strict=True):
        close(one, other)
    by_forward_mode = torch.func.jvp(expansion, point, v)[1]
    twice_back = torch.autograd.functional.jvp(expansion, point, v)[1]
    for found in (by_forward_mode, twice_back):
        close(found, pushed)
    of_values = torch.func.jvp(lambda value: expansion(query, key, value), (value,), v[2:])[1]
    close(of_values, torch.tensordot(expected[2], v[2], dims=4))


def own_code(formula, query, key, value, mask, causal):
    """A model's own attention: queries (R, H, 1, e) and keys (R, G, n, e)."""
    share, scale = query.shape[1] // key.shape[1], formula.scale or e**-0.5
    K, V = (kept.repeat_interleave(share, dim=1) for kept in (key, value))
    s = scale * query @ K.mT
    return (s if mask is None else s.masked_fill(~mask, -torch.inf)).softmax(-1) @ V


@pytest.fixture
def live(double):
    """Queries, keys and values of three rows of one recording and two of another."""
    return torch.randn(5, H, 1, e), torch.randn(5, 2, 1, e), torch.randn(5, 2, 1, f)


@pytest.fixture
def frozen(double):
    """Two recordings of other lengths: one causal, of two samples, and one whose only sample has a mask."""
    long = AttentionCall(torch.randn(2, 2, n, e), torch.randn(2, 2, n, f), None, True)
    mask = torch.tensor([[True, True, False, True]]).expand(4, 4)
    short = AttentionCall(torch.randn(1, 2, 4, e), torch.randn(1, 2, 4, f), mask, False)
    source = torch.tensor([0, 3, 1])
    return [
        (long, Rows(torch.tensor([0, 1, 1]), torch.tensor([2, n - 1, 4]), source)),
        (short, Rows(torch.tensor([0, 0]), torch.tensor([3, 1]))),
    ]


def by_hand(formula, query, key, value, frozen):
    """Return the attention of each row by itself, its live key and value written into copies of the frozen ones."""
    rows = [(past, rows.subset(slice(i, i + 1))) for past, rows in frozen for i in range(len(rows))]
    outputs = []
    for r, (past, row) in enumerate(rows):
        b, t, at = int(row.sample), int(row.token), int(row.live)
        K, V = past.key[b].clone(), past.value[b].clone()
        K[:, at], V[:, at] = key[r, :, 0], value[r, :, 0]
        seen = torch.arange(len(K[0])) <= t if past.mask is None else past.mask[t]
        outputs.append(own_code(formula, query[r : r + 1], K[None], V[None], seen, False))
    return torch.cat(outputs)


@pytest.mark.parametrize("method", [by_formula, by_own_code])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("rows", [1, 2, None])
def test_rows_of_several_recordings(method, scale, rows, live, frozen, monkeypatch):
    """Also expanded one or two rows at a time, at other positions than their own, and without gradients."""
    if rows:
        monkeypatch.setattr(row_attention, "_rows_at_once", lambda *_: rows)
    formula = Formula(scale)
    attention = OriginalAttention(partial(own_code, formula), formula)
    expected = torch.autograd.functional.jacobian(
        lambda *given: by_hand(formula, *given, frozen), live
    )
    found = torch.autograd.functional.jacobian(
        lambda *given: method(attention, *given, frozen), live
    )
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    with torch.no_grad():
        close(method(attention, *live, frozen), by_hand(formula, *live, frozen))


@pytest.mark.parametrize("method", [by_formula, by_own_code])
def test_the_output_is_what_the_model_expects(method, live, frozen):
    """Which may hold further results, such as the weights."""
    formula = Formula()
    attention = OriginalAttention(
        lambda *given: (own_code(formula, *given), "weights"), formula, lambda out: (out, "weights")
    )
    for given, recorded in ((live, frozen), ([one[:3] for one in live], frozen[:1])):
        output, weights = method(attention, *given, recorded)
        close(output, by_hand(formula, *given, recorded))
        assert weights == "weights"


def test_products_are_in_the_recorded_dtype(live, frozen):
    """Under autocast the live tensors may be of another, and products of float32 would be cast."""
    frozen = [
        (AttentionCall(past.key.float(), past.value.float(), past.mask, past.causal), rows)
        for past, rows in frozen
    ]
    rough = [given.bfloat16() for given in live]
    expected = by_hand(Formula(), *(given.float() for given in rough), frozen)
    with torch.autocast("cpu", torch.bfloat16):
        found = by_formula(OriginalAttention(torch.add, Formula()), *rough, frozen)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_without_a_formula_that_is_known(live, frozen):
    query, key, value = live
    three = key.repeat(1, 2, 1, 1)[:, :3], value.repeat(1, 2, 1, 1)[:, :3]
    for formula, given in ((None, (query, key, value)), (Formula(), (query, *three))):
        with pytest.raises(NotSliceable, match="the formula of its attention is not known"):
            by_formula(OriginalAttention(torch.add, formula), *given, frozen)


def test_only_what_is_asked_for_has_a_derivative(live, frozen):
    """Of a query alone, a key alone and a value alone, in both modes."""
    formula = Formula()
    attention = OriginalAttention(torch.add, formula)
    for i in range(3):

        def of_one(method, x, i=i):
            return method(*live[:i], x, *live[i + 1 :], frozen)

        functions = (
            partial(of_one, partial(by_formula, attention)),
            partial(of_one, partial(by_hand, formula)),
        )
        v, u = torch.randn_like(live[i]), torch.randn(5, H, 1, f)
        pushed, expected = (torch.func.jvp(g, (live[i],), (v,))[1] for g in functions)
        close(pushed, expected)
        pulled, expected = (torch.func.vjp(g, live[i])[1](u)[0] for g in functions)
        close(pulled, expected)


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
