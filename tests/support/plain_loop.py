"""A plain training loop, on one rank or several."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.draws import seeded
from tests.support.models import neox

STEPS = 6


def train(watch: Any = None, rank: int | None = None) -> SimpleNamespace:
    """Train a small model with dropout; return it, its losses and all tensors."""
    torch.manual_seed(0)
    model = neox(hidden_dropout=0.2).train()
    trained = model if rank is None else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = seeded(rank or 0)
    losses = []
    for step in range(STEPS):
        if watch is not None:
            watch(step, trained)
        x = torch.randint(3, 50, (4, 8), generator=batches)
        loss = nn.functional.cross_entropy(
            trained(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if watch is not None:
        watch(STEPS, trained, force=True)
    moments = [
        value for values in optimizer.state_dict()["state"].values() for value in values.values()
    ]
    tensors = [torch.as_tensor(value) for value in (*model.state_dict().values(), *moments)]
    return SimpleNamespace(model=model, losses=losses, tensors=[*tensors, torch.get_rng_state()])
