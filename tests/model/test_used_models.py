"""Models that were used before they are measured, and passes in inference mode. The numbers do not change.

Libraries attach things to a model at its first use: hooks and a flag that says so, tables that grow with the longest input,
caches. A model measured before use, after use and after measuring gives the same Dataset bit for bit.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import nn

import tracker
from tests.support.brute_force import Truth
from tests.support.home_made import LM, MLP, PreNorm
from tests.support.llava import SEEN, llava
from tests.support.models import WIDTH, build, tokenizer, tokens
from tests.support.rounding import rounding
from tracker.model.global_state import preserve_global_state


def assert_identical(seen, expected):
    of_the_run = dict.fromkeys(("seconds", "created", "witness"))
    xr.testing.assert_identical(seen.assign_attrs(of_the_run), expected.assign_attrs(of_the_run))


def captured(model, inputs):
    model(**inputs, output_hidden_states=True, output_attentions=True)


def generated(model, inputs):
    model.generate(**inputs, max_new_tokens=2, do_sample=False)


def generated_with_a_static_cache(model, inputs):
    model.generate(**inputs, max_new_tokens=2, do_sample=False, cache_implementation="static")


def trained(model, inputs):
    model.train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()


def compiled(model, inputs):
    torch.compile(model, backend="eager")(**inputs)


def in_inference_mode(model, inputs):
    with torch.inference_mode():
        captured(model, inputs)
        generated(model, inputs)


def adapted(model, inputs):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted(**inputs)
    adapted.merge_adapter()
    adapted.unmerge_adapter()
    adapted.unload()


USES = [generated_with_a_static_cache, trained, compiled, in_inference_mode, adapted]


@pytest.fixture(scope="module")
def fresh_llava():
    torch.manual_seed(0)
    model, inputs = llava().eval(), SEEN
    return model, inputs, tracker.measure(model, inputs, k=4)


@pytest.mark.parametrize("use", [captured, pytest.param(in_inference_mode, marks=pytest.mark.slow)])
def test_hooks_that_transformers_installs_at_first_use(fresh_llava, use):
    model, inputs, expected = fresh_llava
    model = copy.deepcopy(model)
    with torch.no_grad():
        before = model(**inputs).logits
    use(model, inputs)
    assert_identical(tracker.measure(model, inputs, k=4), expected)
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, before)


@pytest.fixture(scope="module")
def fresh_llama():
    model, ids = build("llama, grouped keys")
    return model, ids, tracker.measure(model, ids, k=4)


@pytest.mark.slow
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_used_language_models(fresh_llama, use):
    model, ids, expected = fresh_llama
    model = copy.deepcopy(model)
    use(model, {"input_ids": ids})
    assert_identical(tracker.measure(model, ids, k=4), expected)


class Rotary(nn.Module):
    """Tables of angles that grow with the longest input, as buffers or as attributes; their length is an attribute."""

    def __init__(self, as_buffers: bool):
        super().__init__()
        self.as_buffers = as_buffers
        self.make(3)

    def make(self, n):
        angles = torch.arange(n)[:, None] / torch.logspace(0, 3, WIDTH // 2).repeat(2)
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            if self.as_buffers:
                self.register_buffer(name, table, persistent=False)
            else:
                setattr(self, name, table)
        self.length = n

    def forward(self, x):
        n = x.shape[-2]
        if n > self.length:
            self.make(n)
        first, second = x.chunk(2, -1)
        return x * self.cos[:n].to(x) + torch.cat([-second, first], -1) * self.sin[:n].to(x)


class Attention(nn.Module):
    """Attention through a cache of keys that it writes in place."""

    def __init__(self, cache, rotary):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cache, self.rotary = cache, rotary
        if cache == "buffer":
            self.register_buffer("keys", torch.zeros(2, 16, WIDTH))
        if cache == "made at first use":
            self.keys = None

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.cache:
            if self.keys is None:
                self.keys = torch.zeros_like(k)
            B, n, _ = k.shape
            self.keys[:B, :n] = k
            k = self.keys[:B, :n]
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        q, k, v = (of_one_head[:, None] for of_one_head in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Own(LM):
    """A language model with caches and rotary embeddings; all blocks may share the latter."""

    def __init__(self, cache="", as_buffers=None, shared=False):
        torch.manual_seed(0)
        one = None if as_buffers is None else Rotary(as_buffers)

        def block():
            rotary = one if shared else copy.deepcopy(one)
            return nn.Sequential(PreNorm(Attention(cache, rotary)), PreNorm(MLP()))

        super().__init__(block)
        self.double().eval()


def measured(model, ids):
    return tracker.measure(model, ids, k=4, dtype="float64", keep="jacobian")


def assert_jacobians(ds, model, ids):
    right = Truth(model, ids, [f"blocks.{l}" for l in range(3)], WIDTH).jacobians(-1)[0]
    np.testing.assert_allclose(ds.jacobian[0, 0], right, atol=1e-12)


@pytest.mark.parametrize("as_buffers", [True, False], ids=["buffers", "attributes"])
@pytest.mark.parametrize("shared", [False, True], ids=["of each block", "shared"])
# The full sequence: a table of a single row is another one
@pytest.mark.filterwarnings("ignore:block 1")
def test_tables_that_grow(as_buffers, shared):
    model = Own(as_buffers=as_buffers, shared=shared)
    expected = measured(model, tokens(2, 6))
    assert_jacobians(expected, copy.deepcopy(model), tokens(2, 6))
    with torch.no_grad():
        model(tokens(2, 9))
    assert_identical(measured(model, tokens(2, 6)), expected)
    with torch.inference_mode():
        model(tokens(2, 12))
    assert_identical(measured(model, tokens(2, 6)), expected)


class Counting(Rotary):
    """Counts its calls in a buffer, and keeps what it returned last in an attribute, which the model reads at the end."""

    def __init__(self):
        super().__init__(as_buffers=False)
        self.register_buffer("calls", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.last = super().forward(x)
        return self.last


class Reading(Own):
    def __init__(self):
        super().__init__(as_buffers=False)
        for attention in self.attentions():
            attention.rotary = Counting()

    def attentions(self):
        return [attend.fn for attend, _ in self.blocks]

    def forward(self, ids):
        logits = super().forward(ids)
        return logits + sum(attention.rotary.last.mean() for attention in self.attentions())


@pytest.mark.filterwarnings("ignore:block 1")
def test_attributes_of_modules_that_write_to_buffers_last_as_long_as_the_pass():
    model = Reading()
    assert_jacobians(measured(model, tokens(2, 6)), copy.deepcopy(model), tokens(2, 6))
    assert all(attention.rotary.last is None for attention in model.attentions())


CACHES = ["", "buffer", "made at first use"]


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache or "none")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_in_inference_mode(mode, cache):
    class Decorated(Own):
        forward = mode()(Own.forward)

    ids = tokens(2, 6)
    expected = measured(Own(cache), ids)
    assert expected.diagnostics_sliced.all()
    assert_jacobians(expected, Own(), ids)
    seen = measured(Decorated(cache), ids)
    seen.attrs["model_class"] = expected.attrs["model_class"]
    assert_identical(seen, expected)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache or "none")
def test_models_and_inputs_made_in_inference_mode(cache):
    expected = measured(Own(cache), tokens(2, 6))
    with torch.inference_mode():
        model, ids = Own(cache), tokens(2, 6)
    assert model.embed.weight.is_inference() and ids.is_inference()
    assert_identical(measured(model, ids), expected)
    used = Own(cache)
    with torch.inference_mode():
        used(ids)
    assert_identical(measured(used, ids), expected)


def makes_inference_tensors() -> bool:
    with torch.inference_mode():
        return torch.ones(1).is_inference()


def test_inference_mode_of_other_threads_and_after_an_error():
    enter = torch.inference_mode.__enter__
    with (
        pytest.raises(RuntimeError, match="planted"),
        ThreadPoolExecutor() as other,
        preserve_global_state(torch.device("cpu")),
    ):
        assert other.submit(makes_inference_tensors).result() and not makes_inference_tensors()
        with torch.inference_mode(False):
            assert torch.is_grad_enabled()
        assert not torch.is_grad_enabled()
        raise RuntimeError("planted")
    assert torch.inference_mode.__enter__ is enter and makes_inference_tensors()


def dynamic():
    """Llama whose angles depend on the longest sequence seen. Its own limit of tokens is not that of the angles."""
    model, _ = build("llama, grouped keys")
    rotary = model.model.rotary_emb
    rotary.config = copy.deepcopy(model.config)
    rotary.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rotary.config.max_position_embeddings = rotary.max_seq_len_cached = (
        rotary.original_max_seq_len
    ) = 8
    rotary.rope_type = "dynamic"
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
    return model


def text(ids):
    return " ".join(map(str, ids[0].tolist()))


def test_a_prompt_is_measured_as_if_alone_where_angles_depend_on_the_longest_sequence():
    longer, shorter = tokens(1, 20), tokens(1, 12)
    together = tracker.measure(dynamic(), [text(longer), text(shorter)], tokenizer=tokenizer, k=4)
    alone = tracker.measure(dynamic(), shorter, k=4)
    np.testing.assert_array_equal(together.norm[1].values[:, :12], alone.norm[0].values)
    atol = rounding(torch.float32) * float(alone.singular_value.max())
    np.testing.assert_allclose(
        together.singular_value[1], alone.singular_value[0], rtol=0, atol=atol
    )


def test_a_model_is_measured_as_it_computes_where_use_changes_its_function():
    ids, model = tokens(1, 12), dynamic()
    fresh = tracker.measure(model, ids, k=4)
    with torch.no_grad():
        before = copy.deepcopy(model)(ids).logits
        model(tokens(1, 20))
        after = copy.deepcopy(model)(ids).logits
    assert not torch.equal(before, after)
    used = tracker.measure(model, ids, k=4)
    assert float(abs(used.norm - fresh.norm).max()) > 1e-4
    states = copy.deepcopy(model)(ids, output_hidden_states=True).hidden_states
    expected = [float(state[0, -1].detach().norm()) for state in states]
    np.testing.assert_allclose(used.norm_normed[0].values[:, -1], expected, rtol=1e-5)
