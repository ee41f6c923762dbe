"""Attention of single rows, with the recorded keys and values of the other rows: two methods.

`by_formula`. For one head, weights w = softmax(scale K q + mask) and output o = V^T w, where K and V hold the row's own
live key k and value v at its position t and are constant elsewhere. To first order around (q, k, v),

    do = scale Cov_w(v, k) dq  +  scale w_t (v - o) (q . dk)  +  w_t dv,
    Cov_w(v, k) = V^T diag(w) K - o (K^T w)^T                      (e, e), e the width of a head.

The covariance is computed once per row and head, in 2 n e^2 operations; a cotangent then costs e^2, independent of n.
With capped scores, cap tanh(scale K q / cap), each key is also weighted by their slope; a sink takes part in the softmax
but has no value.

`by_own_code`. The model's own attention on the frozen keys and the live one: any attention, but every cotangent passes
through copies of the keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tracker.jacobians.slicing import NotSliceable, Rows, mask_rows
from tracker.linalg.linear import signed
from tracker.model.attention import Formula, OriginalAttention
from tracker.model.recording import AttentionCall

# Scalars of keys and values; on a CPU few, which its caches hold
AT_ONCE = {True: 1 << 22, False: 1 << 26}


def by_formula(attention: OriginalAttention, frozen: Sequence[tuple[AttentionCall, Rows]]) -> Any:
    """Return the attention of R rows, exact in value and first derivative, from its formula.

    Args:
        attention: the model's own, of the rows' queries (R, H, 1, e), and the live keys (R, G, 1, e) and values (R, G, 1, f): the
            rows' own, or those of their sources. Query head h uses key head h // (H / G).
        frozen: the recorded attentions, each with those of the R rows that belong to it.

    Raises:
        NotSliceable: if the formula is not known.
    """
    given = attention.query, attention.key, attention.value
    # Products within a row are cheap: under autocast they stay in the recorded dtype.
    query, key, value = (live.to(frozen[0][0].key.dtype) for live in given)
    if attention.formula is None or query.shape[1] % key.shape[1]:
        raise NotSliceable("the formula of its attention is not known")
    expansion = Expansion.empty(query, value)
    # The point of expansion is a constant, also where `detach` is the identity
    with torch._C.DisableTorchFunction():
        at_q, at_k, at_v = query.detach(), key.detach(), value.detach()
    with torch.autocast(query.device.type, enabled=False):
        start = 0
        for past, rows in frozen:
            at = rows.on(query.device)
            for first in range(0, len(rows), size := _rows_at_once(past, query.shape[1])):
                part = at.subset(slice(first, first + size))
                K, V = past.key[part.sample_in(past.key)], past.value[part.sample_in(past.value)]
                row = torch.arange(len(K), device=K.device)
                span = slice(start + first, start + first + len(K))
                # The row's own key and value are live, the others frozen as recorded.
                K[row, :, part.live] = at_k[span, :, 0]
                V[row, :, part.live] = at_v[span, :, 0]
                given = attention.formula, at_q[span], K, V, mask_rows(past, part)
                if torch.is_grad_enabled():
                    expansion.fill(span, expand(*given, own=part.live))
                else:
                    expansion.output[span] = attend(*given)[0]
            start += len(rows)
        return attention.format_output(expansion(query, key, value))


def by_own_code(attention: OriginalAttention, frozen: Sequence[tuple[AttentionCall, Rows]]) -> Any:
    """Return the same from the model's own attention, each recording's rows separately."""
    sizes = [len(rows) for _, rows in frozen]
    given = (t.split(sizes) for t in (attention.query, attention.key, attention.value))
    outputs = []
    for (past, rows), q, k, v in zip(frozen, *given, strict=True):
        at = rows.on(q.device)
        is_own = torch.arange(past.key.shape[-2], device=q.device) == at.live[:, None]
        own = is_own[:, None, :, None]  # (R, 1, n, 1)
        K = torch.where(own, k, past.key[at.sample_in(past.key)])
        V = torch.where(own, v, past.value[at.sample_in(past.value)])
        outputs.append(attention.function(q, K, V, mask_rows(past, at), False))
    if isinstance(outputs[0], tuple):  # the output, and further results such as the weights
        return torch.cat([output for output, *_ in outputs]), *outputs[0][1:]
    return torch.cat(outputs)


def _rows_at_once(past: AttentionCall, H: int) -> int:
    """Return how many rows to expand at once: each takes copies of its sample's keys and values, weighted for every head."""
    n, e, f = *past.key.shape[-2:], past.value.shape[-1]
    return max(1, AT_ONCE[past.key.device.type == "cpu"] // (n * H * (2 * e + 2 * f)))


@dataclass
class Expansion:
    """Attention of R rows, expanded to first order in their own query, key and value."""

    output: Float[Tensor, "R H 1 f"]
    by_query: Float[Tensor, "R H e f"]  # transposed: rows multiply from the left
    by_score: Float[Tensor, "R H 1 f"]  # d output / d (own query . own key)
    by_value: Float[Tensor, "R H 1 1"]

    @classmethod
    def empty(cls, query: Tensor, value: Tensor) -> "Expansion":
        """Allocate an expansion for the rows of a query."""
        R, H, _, e = query.shape
        f = value.shape[-1]
        return cls(*(query.new_empty(R, H, *shape) for shape in ((1, f), (e, f), (1, f), (1, 1))))

    def fill(self, index: slice, other: "Expansion") -> None:
        """Copy another expansion into some of the rows."""
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine[index] = theirs

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "R H 1 f"]:
        """Return the output, differentiable in the arguments, which are the point of expansion."""
        return _FirstOrder.apply(query, key, value, self)


def attend(
    formula: Formula,
    query: Float[Tensor, "R H 1 e"],
    K: Float[Tensor, "R G n e"],
    V: Float[Tensor, "R G n f"],
    mask: Tensor | None,
) -> tuple[Float[Tensor, "R H 1 f"], Float[Tensor, "R H 1 n"], Float[Tensor, "R H 1 n"]]:
    """Return the attention's output, its weights, and the derivative of each score by query . key."""
    (R, H, _, e), (G, n) = query.shape, K.shape[1:3]
    scale = e**-0.5 if formula.scale is None else formula.scale
    s = (scale * query.reshape(R, G, H // G, e) @ K.mT).view(R, H, 1, n)
    slope = torch.full_like(s, scale)
    if formula.cap is not None:
        bent = torch.tanh(s / formula.cap)
        s, slope = formula.cap * bent, slope * (1 - bent**2)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if formula.sinks is not None:
        # A sink takes a share of the weights and has no value: it is cut off after the softmax.
        s = torch.cat([s, formula.sinks.view(1, H, 1, 1).expand(R, -1, -1, -1)], dim=-1)
    w = s.softmax(-1)[..., :n]
    return (w.view(R, G, H // G, n) @ V).view(R, H, 1, -1), w, slope


def expand(
    formula: Formula,
    query: Float[Tensor, "R H 1 e"],
    K: Float[Tensor, "R G n e"],
    V: Float[Tensor, "R G n f"],
    mask: Tensor | None,
    own: Tensor,
) -> Expansion:
    """Expand attention around queries whose own keys and values are at position `own` of K and V."""
    (R, H, _, e), (G, n) = query.shape, K.shape[1:3]
    output, w, slope = attend(formula, query, K, V, mask)
    weighted = w * slope
    # d output / d query is the covariance of keys and values under w times the slope, E[k v] - E[k] E[v], (R, G, H / G, e, e').
    weighted_K = weighted.view(R, G, H // G, n, 1) * K[:, :, None]
    mean_K = weighted_K.sum(-2).view(R, H, e, 1)
    covariance = (weighted_K.mT @ V[:, :, None]).view(R, H, e, -1) - mean_K * output
    at_own = own[:, None, None, None].expand(-1, H, 1, 1)
    own_V = V[torch.arange(R, device=own.device), :, own]
    own_V = own_V.repeat_interleave(H // G, dim=1)[:, :, None]
    # By the own score: a weight that grows takes its share from all others.
    by_score = weighted.gather(-1, at_own) * (own_V - output)
    return Expansion(output, covariance, by_score, w.gather(-1, at_own))


class _FirstOrder(torch.autograd.Function):
    """The output of an expansion at its point, and its first derivative."""

    @staticmethod
    @signed
    def forward(query: Tensor, key: Tensor, value: Tensor, expansion: Expansion) -> Tensor:
        """Return the output."""
        return expansion.output.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Keep the expansion and its point."""
        query, key, _, ctx.expansion = inputs
        ctx.query, ctx.groups = query.detach(), key.shape[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Compute the products with the transposed derivative, themselves differentiable."""
        (u,), at = gradients, ctx.expansion
        if u is None:
            return None, None, None, None

        def summed(of_heads: Tensor) -> Tensor:
            """Add up the heads that share a key."""
            H = of_heads.shape[1]
            return of_heads if H == ctx.groups else of_heads.unflatten(1, (ctx.groups, -1)).sum(2)

        of_query, of_key, of_value, _ = ctx.needs_input_grad
        return (
            _of_heads(u, at.by_query.mT) if of_query else None,
            summed((u * at.by_score).sum(-1, keepdim=True) * ctx.query) if of_key else None,
            summed(u * at.by_value) if of_value else None,
            None,
        )

    @staticmethod
    def jvp(
        ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, _: Any
    ) -> Tensor | None:
        """Compute the product with the derivative."""
        at, share = ctx.expansion, ctx.query.shape[1] // ctx.groups
        terms = []
        if dq is not None:
            terms.append(_of_heads(dq, at.by_query))
        if dk is not None:
            score = (ctx.query * dk.repeat_interleave(share, dim=1)).sum(-1, keepdim=True)
            terms.append(at.by_score * score)
        if dv is not None:
            terms.append(at.by_value * dv.repeat_interleave(share, dim=1))
        return sum(terms[1:], terms[0]) if terms else None


def _of_heads(x: Float[Tensor, "R H 1 e"], M: Float[Tensor, "R H e f"]) -> Float[Tensor, "R H 1 f"]:
    return HeadProduct.apply(x.flatten(0, 1), M.flatten(0, 1)).unflatten(0, x.shape[:2])


class HeadProduct(torch.autograd.Function):
    """x @ M for N pairs: x (N, m, e), M (N, e, f) a constant.

    A vmap over x is folded into the rows of one batched product; torch.vmap's own rule copies M for each x.
    """

    @staticmethod
    @signed
    def forward(x: Tensor, M: Tensor) -> Tensor:
        """Compute one batched product."""
        return x @ M

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Save the constant."""
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])
        # A derivative of zeros would be allocated for the constant
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Compute the product with M^T, itself differentiable."""
        (g,), (M,) = gradients, ctx.saved_tensors
        return None if g is None else HeadProduct.apply(g, M.mT), None

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, *_: Any) -> Tensor | None:
        """Compute the same product of the tangent."""
        return None if x is None else HeadProduct.apply(x, ctx.saved_tensors[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, M: Tensor) -> Any:
        """Fold the batch into m."""
        x = x.movedim(in_dims[0], 1)
        return HeadProduct.apply(x.flatten(1, 2), M).unflatten(1, x.shape[1:3]), 1
