"""Attention as people write it, by PyTorch's function."""

import torch.nn.functional as F
from torch import Tensor


def attend(qkv: Tensor, heads: int = 1, causal: bool = False) -> Tensor:
    """Return attention among the tokens of (batch, tokens, 3 width): all queries, then all keys, then all values."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
