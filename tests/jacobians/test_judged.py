"""Sound models are measured whatever is drawn; a derivative that is off at a row that the model is asked about is not used."""

import numpy as np
import pytest
import torch

import tracker
from tests.support.models import GROUPED, Size, build, language, tokens
from tests.support.refused import refused
from tests.support.rounding import rounding
from tests.support.sinks import with_sink
from tracker.jacobians import row_attention, witness

SEED, expand = witness.SEED, row_attention.expand


def scaled(name, factor, dtype=torch.float32):
    model, inputs = build(name)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(factor if weight.ndim > 1 else 1)
    return model.to(dtype), inputs


def zero_states():
    """The first token's state is 0, where all units of a ReLU are at their kink and the norm varies within 1e-3."""
    model, inputs = build("opt")
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.model.decoder.embed_positions):
            table.weight.zero_()
    return model, inputs


def in_single_alone(factor=0.005):
    """Before the blocks, which add little; they themselves run in float64, too."""
    model, inputs = scaled("gpt2", factor)
    model.transformer.wpe.register_forward_hook(lambda module, args, y: y @ torch.eye(y.shape[-1]))
    return model, inputs


SOUND = {
    "zero states": zero_states,
    "saturated, x 30": lambda: scaled("nn.TransformerEncoder, pre-norm", 30),
    "saturated, x 100": lambda: scaled("opt", 100),
    "saturated, x 300": lambda: scaled("gpt_neox", 300),
    "post-norm": lambda: scaled("bert", 30),
    "bfloat16": lambda: scaled("mixtral", 1, torch.bfloat16),
    "sinks": lambda: with_sink("llama, grouped keys"),
    "small": lambda: scaled("gpt2", 0.02),
    "small, float32 alone": in_single_alone,
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SOUND)
def test_sound_models_are_measured(monkeypatch, name, seed):
    monkeypatch.setattr(witness, "SEED", SEED + 1000 * seed)
    ds = tracker.measure(*SOUND[name](), k=2, tokens=[0, -1])
    assert "not asked" not in ds.attrs["witness"]


def test_what_rounding_hides_of_small_jacobians_is_limited():
    """Nothing finer than float32 shows whether a second way of the state is among what it hides."""
    model, inputs = in_single_alone(1e-4)
    with refused(r"J\^T u by its backward pass differs by"):
        tracker.measure(model, inputs, k=2)


def test_code_that_amplifies_rounding_is_measured():
    """Whether rounding hides a row depends on the weights."""

    def checks(seed):
        torch.manual_seed(seed)
        model = language("LlamaForCausalLM", **GROUPED)(Size(depth=2))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(300 if "proj" in name else 1)
        return tracker.measure(model, tokens(2, 9), k=4, tokens="all").attrs["independent_checks"]

    assert any("its code amplifies rounding" in checks(seed) for seed in range(10))


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt_neox", "float32"), ("llama, grouped keys", "float64")]
)
def test_a_part_of_the_formula_that_is_off_is_not_used(monkeypatch, name, dtype):
    """The model's own code gives what the formula gave, at single rows."""
    model, inputs = build(name, Size(depth=1))
    options = {"k": 2, "dtype": dtype, "final_norm": "exclude"}
    right = tracker.measure(model, inputs, **options)
    for part in ("by_query", "by_score", "by_value"):

        def wrong(*given, part=part, **named):
            expansion = expand(*given, **named)
            getattr(expansion, part).mul_(1.01)
            return expansion

        monkeypatch.setattr(row_attention, "expand", wrong)
        ds = tracker.measure(model, inputs, **options)
        assert ds.diagnostics_sliced.all()
        bound = rounding(getattr(torch, dtype), amplified=10)
        np.testing.assert_allclose(ds.singular_value, right.singular_value, rtol=bound)
