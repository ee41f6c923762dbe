"""Intercept the attention of TransformerLens's HookedTransformer, which computes it by methods of its own.

`Attention.forward` calls `apply_rotary(q)`, `apply_rotary(k)`, `calculate_attention_scores(q, k)`, adds biases and a mask, calls
the module `hook_attn_scores` and the softmax, and then `calculate_z_scores(v, pattern)`; states are (B, n, H, e). On a
replica's own module these are replaced: the last hands queries, keys and values to the handler of `tracker.capture.attention`
with the mask that the scores show, and rotary positions are those of the rows that run.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tracker.capture.attention import Formula, OriginalAttention, hand_over, is_intercepted, row_positions

METHODS = ("calculate_attention_scores", "calculate_z_scores", "apply_rotary")


def hook_methods(module: nn.Module) -> None:
    """Intercept the attention of a replica's module, if its class has TransformerLens's methods."""
    if all(hasattr(type(module), name) for name in METHODS) and "hook_attn_scores" in module._modules:
        hooks = _Hooks(module)
        vars(module._modules["hook_attn_scores"])["forward"] = hooks.see_scores
        vars(module).update((name, getattr(hooks, name)) for name in METHODS)


class _Hooks:
    """Replacements for the methods of one attention module."""

    def __init__(self, module: nn.Module) -> None:
        self.own = {name: partial(getattr(type(module), name), module) for name in METHODS}
        self.module: Any = module
        self.seen: dict[str, Tensor] = {}  # query, key, plain and final scores of the running attention

    def apply_rotary(self, x: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        """Rotate single rows by their positions: as the last tokens of sequences with padding on the left."""
        positions = row_positions()
        if positions is not None:
            n = int(positions.max()) + 1
            attention_mask = (torch.arange(n, device=positions.device) >= n - 1 - positions[:, None]).long()
            past_kv_pos_offset = n - 1
        return self.own["apply_rotary"](x, past_kv_pos_offset, attention_mask)

    def calculate_attention_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Note queries, keys and scores."""
        scores = self.own["calculate_attention_scores"](q, k)
        if is_intercepted():
            self.seen = {"q": q, "k": k, "plain": scores.clone()}  # biases are added in place
        return scores

    def see_scores(self, scores: Tensor) -> Tensor:
        """Note the scores with biases and mask."""
        if self.seen:
            self.seen["final"] = scores
        return scores

    def calculate_z_scores(self, v: Tensor, pattern: Tensor) -> Tensor:
        """Hand the attention over."""
        if not self.seen:
            return self.own["calculate_z_scores"](v, pattern)
        seen, self.seen = self.seen, {}
        query, key, value = (state.transpose(1, 2) for state in (seen["q"], seen["k"], v))
        mask = None if row_positions() is not None else _mask(seen["plain"], seen["final"])
        causal = (
            mask is not None
            and mask.dtype == torch.bool
            and torch.equal(mask[0, 0], torch.ones_like(mask[0, 0]).tril())
        )

        def attend(query: Tensor, key_: Tensor, value_: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
            if key_ is key and value_ is value:
                return self.own["calculate_z_scores"](v, pattern)
            return self.attend(query, key_, value_, mask)

        attention = OriginalAttention(attend, self.formula(), lambda output: output.transpose(1, 2))
        return hand_over(attention, query, key, value, None if causal else mask, causal)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the attention from the model's own methods."""
        query, key, value = (state.transpose(1, 2) for state in (query, key, value))
        scores = self.own["calculate_attention_scores"](query, key)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        sinks = self.formula().sinks
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        return self.own["calculate_z_scores"](value, scores.softmax(-1)[..., : key.shape[1]])

    def formula(self) -> Formula:
        """Return the formula that the module's settings state."""
        config = self.module.cfg
        cap = getattr(config, "attn_scores_soft_cap", None)
        sinks = self.module.sinks if getattr(config, "use_attention_sinks", False) else None
        return Formula(1 / float(self.module.attn_scale), cap if cap is not None and cap > 0 else None, sinks)


def _mask(plain: Tensor, final: Tensor) -> Tensor:
    """Return what was added to the scores: a Boolean mask (1 or B, 1, n, n) where that is 0 or -inf, and the sum otherwise."""
    allowed = final > -torch.inf
    if not torch.equal(final[allowed], plain[allowed]):
        return torch.where(allowed, final - plain, final)
    first = allowed[:1, :1]
    return first if bool((allowed == first).all()) else allowed
