"""A replay sees what the recorded call saw: shared dictionaries, caches, tensors that are written to later."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tracker
from tests.support.brute_force import couplings, in_one_graph
from tests.support.home_made import Wrapped
from tests.support.models import build, random
from tests.support.refused import refused
from tests.support.stacks import Attention
from tracker.blocks.find import find_blocks


class Sharing(nn.Module):
    """Attention whose keys and values go through something that all blocks are given."""

    def __init__(self, how):
        super().__init__()
        self.attention, self.qkv, self.how, self.mine = Attention(), nn.Linear(8, 24), how, {}

    def forward(self, x, shared, bias):
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        if self.how == "last writer":  # reads what the block before wrote, then writes
            k, v = (k + shared["k"], v + shared["v"]) if "k" in shared else (k, v)
            shared["k"], shared["v"] = k.detach(), v.detach()
        elif self.how == "memo":  # computes its keys once in a forward pass
            key = id(self)
            shared.setdefault(key, (k, v))
            k, v = shared[key]
        elif self.how == "nested list":
            shared.setdefault("all", [[]])[0].append(k.detach())
            k = k + sum(shared["all"][0][:-1])
        elif self.how == "memo of its own":
            self.mine.setdefault("kv", (k, v))
            k, v = self.mine["kv"]
        out = x + F.scaled_dot_product_attention(q, k, v)[:, 0] + bias
        bias.add_(0.1)  # in place: the next block is given the same tensor
        return out


class Model(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.how = nn.ModuleList([Sharing(how) for _ in range(3)]), how

    def forward(self, x):
        shared, bias, self.states = {}, torch.zeros(8).to(x), [x]
        for block in self.blocks:
            block.mine = block.mine if self.how == "memo of its own" else {}
            self.states.append(block(self.states[-1], shared, bias))
        return self.states[-1]


@pytest.mark.parametrize("how", ["last writer", "memo", "nested list"])
@pytest.mark.parametrize("samples", [1, 2])
def test_what_blocks_share_is_what_each_of_them_was_given(how, samples):
    model, x = Model(how).double(), random(samples, 5, 8)
    with pytest.warns(UserWarning, match="full sequence"):
        ds = tracker.measure(model, x, k=3, dtype="float64")
    model(x.requires_grad_())
    for b in range(ds.sizes["prompt"]):
        J = torch.stack([in_one_graph(x, y, b, -1, -1) for x, y in pairwise(model.states)])
        for name, values in couplings(J, 3).items():
            found = ds[name].sel(k=3).values[b, 0]
            np.testing.assert_allclose(found, values, atol=1e-8, err_msg=name)


def test_a_block_that_remembers_its_keys_between_calls_is_refused():
    """Its replay reproduces the recorded output, and would have a derivative without keys and values."""
    with refused("keeps state between calls"):
        tracker.measure(Model("memo of its own").double(), random(1, 5, 8), k=3, dtype="float64")


# States and masks by position, and by name
@pytest.mark.parametrize("name", ["gpt2", "llama, grouped keys"])
def test_blocks_in_wrappers_that_name_no_argument(name):
    model, inputs = build(name)
    plain = tracker.measure(model, inputs, k=4)
    layers = model.base_model.h if name == "gpt2" else model.base_model.layers
    for l in range(len(layers)):
        layers[l] = Wrapped(layers[l])
    ds = tracker.measure(model, inputs, k=4)
    assert ds.diagnostics_sliced.all()
    np.testing.assert_allclose(ds.miscoupling, plain.miscoupling, atol=1e-5)


def test_an_embedding_in_a_wrapper_is_one_of_token_ids():
    model, inputs = build("gpt2")
    plain = find_blocks(model)
    model.transformer.wte = Wrapped(model.transformer.wte)
    assert find_blocks(model) == plain and plain.include_final_norm
    with refused("vocabulary has 50"):
        tracker.measure(model, inputs + 50)
