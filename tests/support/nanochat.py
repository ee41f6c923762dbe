"""A small transformer as nanochat has it: what is mixed into the hidden state between blocks, and value embeddings."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.home_made import MLP
from tests.support.models import HEADS, VOCABULARY, WIDTH

DEPTH, HEAD = 5, WIDTH // HEADS
WTE = "output of transformer.wte"
H = [f"transformer.h.{i}" for i in range(DEPTH)]
CHAIN = [f"input of {H[0]}", *(f"output of {name}" for name in H)]
# A block, and what is mixed in after it
NEXT = [*(f"input of {name}" for name in H), f"output of {H[-1]}"]


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


class CausalSelfAttention(nn.Module):
    def __init__(self, with_values: bool):
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.ve_gate = nn.Linear(8, HEADS, bias=False) if with_values else None

    def forward(self, x, ve):
        q, k, v = (c(x).unflatten(2, (HEADS, HEAD)) for c in (self.c_q, self.c_k, self.c_v))
        if ve is not None:
            assert self.ve_gate is not None
            v = v + 3 * torch.sigmoid(self.ve_gate(x[..., :8])).unsqueeze(-1) * ve.unflatten(
                2, (HEADS, HEAD)
            )
        q, k, v = (t.transpose(1, 2) for t in (1.2 * norm(q), 1.2 * norm(k), v))
        return self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self, with_values: bool):
        super().__init__()
        self.attn, self.mlp = CausalSelfAttention(with_values), MLP()

    def forward(self, x, ve):
        x = x + self.attn(norm(x), ve)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """In float64 and eval mode.

    `backout` subtracts the state after the middle block from the last one, `smear` mixes each embedding into the next, and
    `skip` adds the state after the second block before
    the last one.
    """

    def __init__(self, backout: bool = False, smear: bool = False, skip: bool = False):
        super().__init__()
        torch.manual_seed(0)
        with_values = [i % 2 == (DEPTH - 1) % 2 for i in range(DEPTH)]
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCABULARY, WIDTH), "h": nn.ModuleList(map(Block, with_values))}
        )
        self.value_embeds = nn.ModuleDict(
            {str(i): nn.Embedding(VOCABULARY, WIDTH) for i, has in enumerate(with_values) if has}
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.smear_gate = nn.Linear(8, 1, bias=False) if smear else None
        self.resid_lambdas = nn.Parameter(torch.linspace(0.9, 1.1, DEPTH))
        self.x0_lambdas = nn.Parameter(torch.linspace(0.4, 0.1, DEPTH))
        self.backout, self.skip = backout, skip
        self.double().eval()

    def forward(self, idx):
        x = norm(self.transformer["wte"](idx))
        if self.smear_gate is not None:
            gate = torch.sigmoid(self.smear_gate(x[:, 1:, :8]))
            x = torch.cat([x[:, :1], x[:, 1:] + 0.3 * gate * x[:, :-1]], 1)
        x0 = middle = early = x
        for i, block in enumerate(self.transformer["h"]):  # type: ignore[arg-type]
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            x = x + 0.3 * early if self.skip and i == DEPTH - 1 else x
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, ve)
            middle = x if i == DEPTH // 2 else middle
            early = x if i == 1 else early
        x = x - 0.2 * middle if self.backout else x
        return 15 * torch.tanh(self.lm_head(norm(x)) / 15)
