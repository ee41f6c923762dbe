"""A measurement of every variable of a family, and the samples from which formulas compute the same."""

from functools import cache

import tracker
from tests.support.brute_force import truth_of
from tests.support.formulas import Sample
from tests.support.models import Size, build, silence
from tracker.measures.registry import KINDS
from tracker.measures.settings import EVERYTHING
from tracker.model.random_numbers import seed_of

# Beginning and end of the names of a diagnostic
VARIANTS = [("", ""), ("", "_normed"), *((f"{kind}_", "") for kind in KINDS)]
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
    options.setdefault("measures", EVERYTHING)
    options |= {"window": 5 if deep else 3, "keep": ("jacobian", "singular_vectors")}
    ds = tracker.measure(
        model, inputs, k=(2, 4), tokens=(1, -1), pair_tokens=[0, 1, 3], dtype="float64", **options
    )
    truth = truth_of(model, inputs, ds)
    own = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    unembedding = getattr(model, "cls", own)  # BERT's head transforms the state first
    seeds = [seed_of([one], {}) for one in inputs]
    return ds, [Sample(ds, truth, b, unembedding, seed) for b, seed in enumerate(seeds)]
