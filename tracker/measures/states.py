"""Measures of the states of a recorded pass: trajectory, logit entropy, principal plane, response to noise.

Trajectory and entropy process a few tokens of all depths at a time, within a part of the memory budget. Noise and principal
axes process all tokens of one depth at a time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.common.errors import UsageError, warn_caller
from tracker.linalg.transfer import drawn, to_arrays, to_device
from tracker.measures import trajectory
from tracker.measures.declaration import STATE, Measure
from tracker.measures.settings import Settings
from tracker.model.recording import Recording
from tracker.model.replica import Replica

# Root mean square length of the noise, relative to the length of the embedding
NOISE = (0.01, 0.03, 0.1, 0.3, 1.0)


# Variables that are read off the states alone
STATES = (*trajectory.DECLARED, *trajectory.DECLARED_USE)
DECLARED = (
    Measure(
        "entropy",
        STATE,
        "entropy of the next token",
        "nats",
        option="entropy",
        formula="−Σ p ln p, p = softmax of the logits that the model computes from xˡ in the place of xᴸ",
        reference="paper, Fig. 26",
        curve="last quartiles",
        counted=True,
        metric="trajectory/entropy",
        logged=("",),
        headline=True,
        main=True,
        text="The prediction from each state, through all that the model computes after its blocks.",
        charts=("depth",),
    ),
    Measure(
        "pca",
        (*STATE, "component"),
        "state on the principal axes of the last states",
        trajectory.HIDDEN_STATE,
        option="pca",
        formula="components of xˡ on the two principal axes of the rows of Xᴸ",
        reference="paper, A.2.1",
        counted=True,
    ),
    Measure(
        "noise_similarity",
        ("noise", *STATE),
        "cosine to the states without noise",
        option="noise",
        formula="cos(xˡ, x̃ˡ), x̃ˡ the state with noise on the embeddings",
        reference="paper, Fig. 32",
        curve="last mean",
        counted=True,
        metric="trajectory/noise_similarity",
        logged=("",),
        main=True,
    ),
)
DIMS = {measure.name: measure.dims for measure in (*STATES, *DECLARED)}

# (samples, positions) -> values with the dimensions of `DIMS`, the positions of one sample after those of another
StateMeasure = Callable[[slice, slice], dict[str, Tensor]]
AT_ONCE = 1 << 18  # scalars of states at once on a CPU, whose caches hold them


def measure_states(
    replica: Replica,
    recording: Recording,
    valid: Sequence[Sequence[int]],
    window: int,
    settings: Settings,
) -> list[dict[str, np.ndarray]]:
    """Return the requested measures of the states of each sample; NaN at padding.

    Args:
        recording: the recorded pass.
        valid: the positions of each sample that are not padding.

    Raises:
        UsageError: if entropy is requested by name and the states give no logits.
    """
    device, tail = replica.device, recording.tail
    if settings.includes("entropy"):
        recording.obstacle = tail.check(recording.calls[-1].y.to(device))
        # Only where it was named: "all" measures what the model has.
        if recording.obstacle and "entropy" in settings.measures:
            raise UsageError(f"measures='entropy', but {recording.obstacle}")
    _, n, d = recording.calls[0].x.shape
    scalars = d
    requested: list[StateMeasure] = []
    asked = [measure for measure in STATES if settings.includes(measure.option)]
    for normed in (False, True):
        measures = [measure for measure in asked if (measure.variant == "normed") == normed]
        if measures and (not normed or recording.normed_last is not None):
            read = partial(recording.states, device=device, normed=normed)
            requested.append(partial(_trajectory, measures, window, read))
    if settings.includes("pca"):
        mean, axes = principal_axes_of_samples(recording.calls[-1].y.to(device), valid)

        def pca(b: slice, part: slice) -> dict[str, Tensor]:
            X = recording.states(b, part, device)
            by_sample = X.view(len(X), len(mean[b]), -1, d)
            return {"pca": ((by_sample - mean[b][:, None]) @ axes[b]).flatten(1, 2)}

        requested.append(pca)
    if settings.includes("noise"):
        similarity = noise_similarity(replica, recording, valid)
        requested.append(lambda b, part: {"noise_similarity": similarity[:, :, b, part].flatten(2)})
    if settings.includes("entropy") and not recording.obstacle:
        scalars += recording.logits or 0

        def entropy(b: slice, part: slice) -> dict[str, Tensor]:
            p = tail.logits(recording.states(b, part, device)).softmax(-1)
            return {"entropy": torch.special.entr(p).sum(-1)}

        requested.append(entropy)
    # Logits take far more memory than states, so that they decide how many tokens are read at once.
    per_token = (len(recording.calls) + 1) * scalars
    at_once = max(1, settings.memory(16) // (per_token * settings.torch_dtype.itemsize))
    together = at_once if device.type != "cpu" else min(at_once, AT_ONCE // per_token)
    parts = [slice(start, start + at_once) for start in range(0, n, at_once)]
    samples: list[dict[str, np.ndarray]] = []
    for b in range(0, len(valid), size := max(1, together // n)):
        samples_at_once = slice(b, min(b + size, len(valid)))
        read = [_evaluate(requested, samples_at_once, part) for part in parts]
        samples += [
            _join([part[i] for part in read], valid[b + i], n)
            for i in range(samples_at_once.stop - b)
        ]
    return samples


def warn_of_missing_logits(recording: Recording, settings: Settings) -> None:
    """Warn if "all" leaves out the entropy of a language model, because its states give no logits."""
    asked = settings.includes("entropy") and "entropy" not in settings.measures
    if asked and recording.logits is not None and recording.obstacle:
        warn_caller(
            f"measures='all' leaves out the entropy of the next token: {recording.obstacle}"
        )


def principal_axes_of_samples(
    y: Float[Tensor, "B n d"], valid: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return the mean (B, d) and the principal axes (B, d, 2) of each sample's states, without padding."""
    whole = all(len(at) == y.shape[1] for at in valid)
    chosen = y
    if not whole:
        at = [to_device(y.device, torch.tensor(of_sample))[0] for of_sample in valid]
        chosen = [x[of_sample] for x, of_sample in zip(y, at, strict=True)]
    mean, axes = zip(*map(trajectory.principal_axes, chosen), strict=True)
    return torch.stack(mean), torch.stack(axes)


def _trajectory(
    measures: Sequence[Measure],
    window: int,
    states: Callable[[slice, slice], Tensor],
    b: slice,
    part: slice,
) -> dict[str, Tensor]:
    X = states(b, part)
    values = {}
    for measure in measures:
        assert measure.compute is not None
        given = (X, window) if measure.windowed else (X,)
        values[measure.name] = measure.compute(*given)
    return values


def noise_similarity(
    replica: Replica, recording: Recording, valid: Sequence[Sequence[int]]
) -> Float[Tensor, "levels depth B n"]:
    """Return cos(x^l, x~^l), where x~^l is the state after Gaussian noise is added to the embeddings (Fig. 32).

    The root mean square length of a token's noise is `NOISE` times the length of its embedding. All levels of a sample
    scale one draw, from the sample's seed. Padding gets no noise. NaN where a state is zero.
    """
    # Drawn on the CPU, where a seed gives the same numbers on every machine, and without padding, which batches add.
    first = recording.calls[0].x.to(replica.device)
    unit = torch.zeros(first.shape, dtype=torch.float64)
    for of_sample, seed, at in zip(unit, recording.sample_seeds, valid, strict=True):
        of_sample[list(at)] = drawn((len(at), first.shape[-1]), seed)
    (unit,) = to_device(first.device, unit.to(first.dtype))
    noise = unit * torch.linalg.vector_norm(first, dim=-1, keepdim=True) / sqrt(first.shape[-1])
    noisy = [first + level * noise for level in NOISE]
    cosines = [cosine_to(noisy, first)]
    for recorded in recording.calls:
        call = recorded.on_device()
        with replica.materialize(call.block):
            noisy = [call(x) for x in noisy]
        cosines.append(cosine_to(noisy, call.y))
    return torch.stack(cosines, 1)


def cosine_to(noisy: Sequence[Tensor], clean: Tensor) -> Float[Tensor, "levels B n"]:
    """Return the cosine of noisy states to those without noise; NaN where these are zero."""
    nonzero = torch.linalg.vector_norm(clean, dim=-1) > 0
    return torch.stack(
        [torch.where(nonzero, torch.cosine_similarity(x, clean, dim=-1), torch.nan) for x in noisy]
    )


def _evaluate(
    measures: Sequence[StateMeasure], samples: slice, part: slice
) -> list[dict[str, np.ndarray]]:
    """Return the values of each of some samples; those of all are copied to the host at once."""
    values = {name: value for measure in measures for name, value in measure(samples, part).items()}
    size = samples.stop - samples.start
    split = {name: np.split(array, size, _axis(name)) for name, array in to_arrays(values).items()}
    return [{name: arrays[i] for name, arrays in split.items()} for i in range(size)]


def _join(
    parts: Sequence[dict[str, np.ndarray]], valid: Sequence[int], n: int
) -> dict[str, np.ndarray]:
    """Join the parts along `position`; NaN where a position is padding."""
    padding = np.setdiff1d(np.arange(n), valid)
    values = {
        name: np.concatenate([part[name] for part in parts], _axis(name)) for name in parts[0]
    }
    for name, value in values.items():
        np.moveaxis(value, _axis(name), 0)[padding] = np.nan
    return values


def _axis(name: str) -> int:
    return DIMS[name].index("position")
