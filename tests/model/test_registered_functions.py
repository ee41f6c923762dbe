"""Attention and experts registered with transformers run in a replica; transformers' kernels give way to the family's own."""

import numpy as np
import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import sdpa_mask

import tracker
from tests.support.central_differences import assert_measured_as_it_runs
from tests.support.draws import integers
from tests.support.llava import SEEN, llava
from tracker.model.replica import Replica

IDS = integers(3, 60, 2, 6)
SIZE = dict(
    vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
)
GROUPED = dict(num_key_value_heads=1, head_dim=8)


def sigmoid(module, query, key, value, mask, scaling=None, **more):
    weights = (
        (query @ key.transpose(-1, -2) * scaling).sigmoid().tril(key.shape[-2] - query.shape[-2])
    )
    return (weights @ value).transpose(1, 2).contiguous(), weights


def bidirectional(module, query, key, value, mask, scaling=None, **more):
    """Without a registered mask it is given none."""
    assert mask is None
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def masked_sigmoid(module, query, key, value, mask, scaling=None, **more):
    weights = (query @ key.transpose(-1, -2) * scaling).sigmoid() * mask
    return (weights @ value).transpose(1, 2).contiguous(), weights


def always_masked(*arguments, **options):
    """As sdpa, which does without a mask where all is causal."""
    return sdpa_mask(*arguments, **options | {"allow_is_causal_skip": False})


def neox(attention):
    """A model whose norms compute in float64."""
    torch.manual_seed(0)
    model = transformers.GPTNeoXModel._from_config(
        transformers.GPTNeoXConfig(**SIZE), attn_implementation=attention
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model.double().eval()


@pytest.mark.parametrize("function", [sigmoid, bidirectional])
@pytest.mark.parametrize("name", ["mine", "flash_attention_2", "sdpa"])
def test_a_registered_attention_is_measured(monkeypatch, function, name):
    """Also under the name of a kernel, which then has a mask."""
    monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, name, raising=False)
    model = neox("eager")
    model.config._attn_implementation = name
    assert_measured_as_it_runs(model, IDS, model.layers)
    assert model.config._attn_implementation == name


def test_a_registered_attention_with_a_registered_mask(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", masked_sigmoid)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "mine", always_masked)
    model = neox("mine")
    assert_measured_as_it_runs(model, IDS, model.layers)


def test_registered_experts_are_measured(monkeypatch):
    def halved(self, hidden, index, weights):
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            gate, up = (hidden @ self.gate_up_proj[expert].T).chunk(2, -1)
            taken = (weights * (index == expert)).sum(-1, keepdim=True)
            output = output + 0.5 * taken * ((self.act_fn(gate) * up) @ self.down_proj[expert].T)
        return output

    monkeypatch.setitem(ExpertsInterface._global_mapping, "halved", halved)
    config = transformers.MixtralConfig(
        **SIZE, **GROUPED, num_local_experts=3, num_experts_per_tok=2
    )
    model = (
        transformers.MixtralModel._from_config(config, attn_implementation="eager").double().eval()
    )
    model.config._experts_implementation = "halved"
    # Its norms and its router compute in float32.
    assert_measured_as_it_runs(model, IDS, model.layers, step=1e-3, tolerance=1e-3)
    assert model.config._experts_implementation == "halved"


@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_kernels_give_way_to_attention_with_soft_caps_and_sinks(family):
    """sdpa has neither."""
    config = getattr(transformers, f"{family}Config")(**SIZE, **GROUPED, **MORE[family])
    model = (
        getattr(transformers, f"{family}Model")
        ._from_config(config, attn_implementation="eager")
        .eval()
    )
    expected = tracker.measure(model, IDS, k=2)
    for name in ("flex_attention", "flash_attention_2", "paged|flash_attention_2"):
        model.config._attn_implementation = name
        seen = tracker.measure(model, IDS, k=2)
        np.testing.assert_array_equal(seen.miscoupling, expected.miscoupling)
        assert model.config._attn_implementation == name


MORE = {
    "Gemma2": dict(attn_logit_softcapping=0.01, query_pre_attn_scalar=8),
    "GptOss": dict(num_local_experts=2, num_experts_per_tok=1),
}


def test_names_in_the_configs_of_parts_are_the_callers():
    model = llava().eval()
    configs = [model.config, model.config.text_config, model.config.vision_config]
    expected = tracker.measure(model, SEEN, k=2)
    model.config._attn_implementation = "flex_attention"
    seen = tracker.measure(model, SEEN, k=2)
    assert [config._attn_implementation for config in configs] == ["flex_attention"] * 3
    replica = Replica(model, tracker.find_blocks(model), torch.float32, torch.device("cpu")).module
    text = replica.config.text_config
    parts = [
        part for part in replica.modules() if type(getattr(part, "config", None)) is type(text)
    ]
    assert (
        parts and all(part.config is text for part in parts) and text._attn_implementation == "sdpa"
    )
    np.testing.assert_allclose(seen.miscoupling, expected.miscoupling, atol=1e-5)
