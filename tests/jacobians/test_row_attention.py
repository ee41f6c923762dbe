"""The first-order expansion of one row's attention against autograd through the attention itself, in float64."""

import pytest
import torch

from tracker.jacobians.row_attention import HeadProduct, expand
from tracker.model.attention import Formula

R, H, n, e, f = 3, 4, 6, 5, 7


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
def test_value_and_jacobian(formula, G, masked):
    torch.set_default_dtype(torch.float64)
    try:
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
        live = torch.zeros(R, 1, 1, n, 1, dtype=torch.bool)
        live[torch.arange(R), :, :, own] = True
        at = live[:, 0]
        expansion = expand(
            formula, query, torch.where(at, key, K), torch.where(at, value, V), mask, own
        )
        torch.testing.assert_close(
            expansion(query, key, value),
            attention(formula, query, key, value, K, V, own, mask),
            atol=1e-12,
            rtol=0,
        )
        seen = torch.autograd.functional.jacobian(expansion, (query, key, value))
        expected = torch.autograd.functional.jacobian(
            lambda *given: attention(formula, *given, K, V, own, mask), (query, key, value)
        )
        point, v = (query, key, value), tuple(torch.randn_like(t) for t in (query, key, value))
        pushed = sum(torch.tensordot(J, t, dims=4) for J, t in zip(expected, v, strict=True))
        for one, other in zip(seen, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
        by_forward_mode = torch.func.jvp(expansion, point, v)[1]
        twice_back = torch.autograd.functional.jvp(expansion, point, v)[1]
        for found in (by_forward_mode, twice_back):
            torch.testing.assert_close(found, pushed, atol=1e-12, rtol=0)
        of_values = torch.func.jvp(lambda value: expansion(query, key, value), (value,), v[2:])[1]
        torch.testing.assert_close(
            of_values, torch.tensordot(expected[2], v[2], dims=4), atol=1e-12, rtol=0
        )
    finally:
        torch.set_default_dtype(torch.float32)


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
