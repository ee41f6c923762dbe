"""Models of a token whose state is far larger than what a block adds to it."""

import torch

from tests.support.models import build

SINK = 3  # the id of the token with large states


def with_sink(name, dimensions=slice(None), at=0, size=None):
    """Return a model and inputs whose first token, or another, has large states, in all dimensions or in some."""
    model, inputs = build(name, size)
    inputs = inputs.clamp(min=SINK + 1)
    inputs[:, at] = SINK
    with torch.no_grad():
        model.get_input_embeddings().weight[SINK, dimensions] *= 1e4
    return model, inputs
