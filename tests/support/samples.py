"""A measurement of every variable of a family, and the samples from which formulas compute the same."""

from functools import cache

from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tracker
from tests.support import brute_force
from tests.support.formulas import (
    Sample,
)
from tests.support.models import FAMILIES, Size, build, silence
from tracker.blocks.find import find_blocks
from tracker.measures.settings import EVERYTHING
from tracker.model.random_numbers import seed_of

SILENT = "a block that adds nothing"


@cache
def measured(name, **options):
    """Return a measurement of every variable, and its samples."""
    of = {SILENT: "gpt_neox"}.get(name, name)
    deep = name == "gpt_neox"  # so that windows fit around some blocks and not around others
    model, inputs = build(of, Size(depth=5 if deep else 3))
    model = model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    if name == SILENT:
        silence(model, [1])
    norms_in_float64(model)
    options.setdefault("measures", EVERYTHING)
    options |= {"window": 5 if deep else 3, "keep": ("jacobian", "singular_vectors")}
    ds = tracker.measure(
        model, inputs, k=(2, 4), tokens=(1, -1), pair_tokens=[0, 1, 3], dtype="float64", **options
    )
    found = find_blocks(model)
    norm = brute_force.final_norm(model, ds)
    blocks = [model.get_submodule(one) for one in found.names]
    oracle = brute_force.run(
        model, inputs, blocks, None, found.batch_first, functorch=name != "bloom"
    )
    own = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    unembedding = getattr(model, "cls", own)  # BERT's head transforms the state first
    sliced, seeds = not FAMILIES[of].full, [seed_of([one], {}) for one in inputs]
    return ds, [
        Sample(ds, oracle, b, norm, unembedding, seed, sliced) for b, seed in enumerate(seeds)
    ]


def norms_in_float64(model):
    """Let norms compute in the dtype of their input: Llama's compute in float32, to which no derivative of theirs is exact."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if isinstance(norm, LlamaRMSNorm):
                exact = nn.RMSNorm(len(norm.weight), norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(module, name, exact)
