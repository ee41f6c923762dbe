"""What is read off the states of a recorded pass: trajectory measures, logit entropy, principal plane, response to noise.

States are taken some tokens at a time, in a part of the memory budget; noise and principal axes take whole states, one block's
at a time.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import sqrt

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tracker.capture.recording import Recording
from tracker.capture.replicas.replica import Replica
from tracker.errors import UsageError
from tracker.measures import trajectory
from tracker.measures.registry import DIMS, TRAJECTORY
from tracker.measures.settings import Settings

NOISE = (0.01, 0.03, 0.1, 0.3, 1.0)  # root mean square length of the noise over the embedding's

Reading = Callable[[int, slice], dict[str, Tensor]]  # of some tokens of a sample, with the dimensions of `DIMS`


def readings(
    replica: Replica,
    states: Recording,
    raw: Recording,
    norm: nn.Module | None,
    valid: Sequence[Sequence[int]],
    window: int,
    settings: Settings,
) -> list[dict[str, np.ndarray]]:
    """By sample, all that was asked for of each position; NaN at padding.

    Args:
        states: the pass, with the final norm as the convention has it.
        raw: the pass without the final norm.
        norm: the final norm, if there is one.
        valid: each sample's positions that are not padding.

    Raises:
        UsageError: if entropy was asked for by name, and the model has no unembedding.
    """
    on, head = replica.device, replica.description.unembedding
    if head is None and "entropy" in settings.measures:
        raise UsageError(
            "measures='entropy', but no unembedding was found in this model: name the module that maps a hidden state to "
            "logits, blocks=find_blocks(model, unembedding=...)"
        )
    _, n, d = raw.calls[0].x.shape
    scalars = d
    asked: list[Reading] = []
    if settings.includes("trajectory"):
        asked.append(lambda b, part: _trajectory(states.states(b, part, on), raw.states(b, part, on), window))
    if settings.includes("pca"):
        axes = [
            trajectory.principal_axes(states.calls[-1].y[b, list(at)].to(replica.device)) for b, at in enumerate(valid)
        ]
        asked.append(lambda b, part: {"pca": (states.states(b, part, on) - axes[b][0]) @ axes[b][1]})
    if settings.includes("noise"):
        similarity = noise_similarity(replica, states, NOISE)
        asked.append(lambda b, part: {"noise_similarity": similarity[:, :, b, part]})
    with ExitStack() as lent:
        if settings.includes("entropy") and head is not None:
            unembedding = replica.module.get_submodule(head)
            lent.enter_context(replica.guard())
            for module in (unembedding, norm):
                lent.enter_context(replica.materialize(module))
            scalars += int(unembedding(raw.states(0, slice(1), on)[:1]).shape[-1])
            asked.append(
                lambda b, part: {
                    "entropy": trajectory.entropy(raw.states(b, part, on), norm or torch.nn.Identity(), unembedding)
                }
            )
        at_once = max(1, settings.memory(16) // ((len(raw.calls) + 1) * scalars))  # several copies of as many are made
        parts = [slice(start, start + at_once) for start in range(0, n, at_once)]
        return [_joined([_all(asked, b, part) for part in parts], at, n) for b, at in enumerate(valid)]


def noise_similarity(replica: Replica, states: Recording, levels: Sequence[float]) -> Float[Tensor, "levels depth B n"]:
    """Cosine of each state with what it becomes when Gaussian noise is added to the embeddings (Fig. 32).

    The noise of a token has `levels` times the length of its embedding, as a root mean square; the draw is the same at
    every level, and another for each sample: its seed is a checksum of the embeddings. NaN where a state is zero.
    """
    first = states.calls[0].x.to(replica.device)
    drawn = torch.stack([_normal(x) for x in first])
    noise = drawn * torch.linalg.vector_norm(first, dim=-1, keepdim=True) / sqrt(first.shape[-1])
    noisy = [first + level * noise for level in levels]
    cosines = [_cosine(noisy, first)]
    for recorded in states.calls:
        call = recorded.to(replica.dtype, replica.device)
        with replica.materialize(call.block), replica.materialize(call.final_norm):
            noisy = [call(x) for x in noisy]
        cosines.append(_cosine(noisy, call.y))
    return torch.stack(cosines, 1)


def _normal(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    seed = zlib.crc32(x.cpu().contiguous().view(torch.uint8).numpy().data)
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x)


def _cosine(noisy: Sequence[Tensor], clean: Tensor) -> Float[Tensor, "levels B n"]:
    there = torch.linalg.vector_norm(clean, dim=-1) > 0
    return torch.stack([torch.where(there, torch.cosine_similarity(x, clean, dim=-1), torch.nan) for x in noisy])


def _trajectory(states: Tensor, raw: Tensor, window: int) -> dict[str, Tensor]:
    values = {}
    for measure in TRAJECTORY:
        assert measure.formula is not None
        X = raw if measure.raw else states
        values[measure.name] = measure.formula(X, window) if measure.windowed else measure.formula(X)
    return values


def _all(asked: Sequence[Reading], b: int, part: slice) -> dict[str, np.ndarray]:
    return {name: value.cpu().numpy() for reading in asked for name, value in reading(b, part).items()}


def _joined(parts: Sequence[dict[str, np.ndarray]], valid: Sequence[int], n: int) -> dict[str, np.ndarray]:
    """The parts along `position`, NaN where a position is padding."""
    padding = np.setdiff1d(np.arange(n), valid)
    values = {name: np.concatenate([part[name] for part in parts], _axis(name)) for name in parts[0]}
    for name, value in values.items():
        np.moveaxis(value, _axis(name), 0)[padding] = np.nan
    return values


def _axis(name: str) -> int:
    return DIMS[name].index("position")
