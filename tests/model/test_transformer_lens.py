"""TransformerLens models: HookedTransformer and TransformerBridge, both of TransformerLens 3."""

import numpy as np
import pytest
import torch
import transformers
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.model_bridge import TransformerBridge

import tracker
from tests.support.brute_force import truth_of
from tests.support.draws import perturbed
from tests.support.rounding import of_miscouplings, rounding
from tests.support.unchanged import assert_unchanged, snapshot
from tests.support.words import tokenizer
from tests.zoo.claims import assert_jacobians, assert_states
from tracker.model.wrappers import unwrap

IDS = torch.tensor([[1, 4, 2, 7, 3, 5, 9], [0, 2, 2, 8, 6, 1, 3]])
DEPTH = 3
RANDOM = dict(
    n_layers=DEPTH, d_model=16, n_ctx=48, d_head=4, n_heads=4, d_vocab=10, seed=0, device="cpu"
)
HOOKED = {
    "attention only": dict(attn_only=True, act_fn=None),
    "folded RMSNorm": dict(
        normalization_type="RMSPre",
        n_key_value_heads=2,
        gated_mlp=True,
        act_fn="silu",
        positional_embedding_type="rotary",
    ),
}


BRIDGED = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=10, n_positions=48, n_embd=16, n_layer=DEPTH, n_head=4, initializer_range=0.3
        )
    ),
    "pythia-70m": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZE)),
}
SIZE = dict(
    vocab_size=10,
    max_position_embeddings=48,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=DEPTH,
    num_attention_heads=4,
    initializer_range=0.3,
    bos_token_id=0,
    eos_token_id=0,
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning:transformer_lens"),
]
FULL = pytest.mark.filterwarnings("ignore:.*measured over the full sequence")


def hooked(**options):
    settings = {"act_fn": "gelu", "initializer_range": 0.3, **RANDOM, **options}
    model = HookedTransformer(HookedTransformerConfig(**settings))
    return perturbed(model, seed=1)


def saved_tokenizer(directory):
    words = tokenizer()
    words.bos_token = words.eos_token = words.pad_token = "the"
    words.save_pretrained(directory)
    return transformers.AutoTokenizer.from_pretrained(directory)


def bridge(name, directory, compatible):
    model = TransformerBridge.boot_transformers(
        name, hf_model=BRIDGED[name]().eval(), tokenizer=saved_tokenizer(directory), device="cpu"
    )
    if compatible:
        model.enable_compatibility_mode()
    return model


def check_against_truth(model, final_norm):
    """Measure in float64 and compare every Jacobian, norm and mis-coupling; `final_norm` is its name."""
    before = snapshot(model)
    ds = tracker.measure(model, IDS, k=4, tokens="all", dtype="float64", keep="jacobian")
    assert_unchanged(model, before)
    assert ds.attrs["final_norm"] == "include"
    assert ds.attrs["final_norm_module"] == final_norm
    assert ds.sizes["layer"] == DEPTH
    truth = truth_of(unwrap(model.to(torch.float64)), IDS, ds)
    assert_jacobians(ds, truth)
    assert_states(ds, truth)
    return ds


@FULL
@pytest.mark.parametrize("name", HOOKED)
def test_hooked_transformers_against_brute_force(name):
    ds = check_against_truth(hooked(**HOOKED[name]), "ln_final")
    assert not ds.diagnostics_sliced.any()
    assert "10 logits follow" in ds.attrs["final_norm_reason"]


@FULL
@pytest.mark.parametrize("name", ["gpt2", "pythia-70m"])
def test_bridges_in_compatibility_mode_against_brute_force(name, tmp_path):
    model = bridge(name, tmp_path, compatible=True)
    norm = {"gpt2": "transformer.ln_f", "pythia-70m": "gpt_neox.final_layer_norm"}[name]
    check_against_truth(model, norm)


@FULL
@pytest.mark.parametrize("name", BRIDGED)
def test_a_plain_bridge_has_the_measures_of_its_hugging_face_model(name, tmp_path):
    plain = tracker.measure(BRIDGED[name]().eval(), IDS, k=4)
    torch.manual_seed(0)
    ds = tracker.measure(bridge(name, tmp_path, compatible=False), IDS, k=4)
    assert ds.attrs["final_norm"] == plain.attrs["final_norm"] == "include"
    for measure in ("miscoupling", "miscoupling_normed", "lss", "expodistance", "norm"):
        bound = (
            of_miscouplings(plain) if measure.startswith("miscoupling") else rounding(torch.float32)
        )
        np.testing.assert_allclose(ds[measure], plain[measure], rtol=bound, atol=bound)


@FULL
def test_prompts_and_hooks_of_the_caller(tmp_path):
    model, fired = hooked(tokenizer_name=None), []
    model.set_tokenizer(saved_tokenizer(tmp_path))
    model.blocks[1].hook_resid_pre.add_hook(lambda x, hook: fired.append(hook.name) or 2 * x)
    prompt = "the cat sat on the mat"
    ds = tracker.measure(model, prompt, tokenizer=model.tokenizer, k=4)
    assert ds.attrs["witness"].startswith("agrees")
    assert fired == []
    with torch.no_grad():
        model(model.tokenizer(prompt, return_tensors="pt")["input_ids"])
        assert fired == ["blocks.1.hook_resid_pre"]
        model.reset_hooks()
    ids = model.tokenizer(prompt, return_tensors="pt")["input_ids"]
    plain = tracker.measure(model, ids, k=4)
    ratio = ds.singular_value / plain.singular_value
    assert abs(ratio[:, :, 0] - 1).max() < 1e-4 < abs(ratio[:, :, 1] - 1).max()
