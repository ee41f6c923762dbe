"""One model, one set of inputs, one labelled result: the place where the measurements are composed.

For each forward call: record it once (`recording`); from the states the trajectory measures; then, for the token rows of
one call or several, their couplings (`depthwise`); at last one labelled Dataset (`dataset`). Memory: the recordings of
the calls whose rows are measured together (beyond their part of a declared budget, in files), and what their couplings
take, another part of it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tracker import trajectory
from tracker.blocks import Blocks, UsageError, find_blocks
from tracker.dataset import Sample, assemble
from tracker.depthwise import METHODS, Method, depthwise_couplings, rows_at_once
from tracker.inputs import Batch, batches, positions, whole_numbers
from tracker.provenance import describe, digest, usable_device
from tracker.recording import Recording, record, undisturbed
from tracker.replica import Replica
from tracker.rows import PRECISIONS, Jacobians, Precision, Rows

RELEASE_K = (10, 30, 50)
MEASURES = ("coupling", "trajectory")
MEMORY_BUDGET = 4 << 30  # bytes

FinalNorm = Literal["auto", "include", "exclude", "drop"]


def measure(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Callable[..., Mapping[str, Tensor]] | None = None,
    k: int | Sequence[int] | None = None,
    tokens: str | Sequence[int] | None = None,
    final_norm: FinalNorm = "auto",
    svd: Method = "auto",
    dtype: torch.dtype = torch.float32,
    precision: Precision = "float32",
    memory_budget: int = MEMORY_BUDGET,
    device: torch.device | str | None = None,
    measures: Sequence[str] | None = None,
    blocks: str | Sequence[str | nn.Module] | Blocks | None = None,
    max_tokens: int | None = None,
    window: int | None = None,
) -> xr.Dataset:
    """Measure transformer block coupling and token trajectories of one model (Aubry et al., ICLR 2025).

    The model is only read: its parameters, dtypes, modes, gradients, hooks and the random state are as they were,
    also when measuring raises. Dropout and stochastic depth are off; every weight is used in `dtype`, whatever it is
    stored in.

    Args:
        model: a Hugging Face, timm, torchvision or plain PyTorch transformer.
        inputs: prompts (with `tokenizer`), or a tensor or mapping that the model's forward takes, batch first.
        k: how many top singular vectors; one number or several. None: those of 10, 30, 50 not above the width d, or
            d // 2 if none is.
        tokens: whose Jacobians: "last", "cls", "all", or indices. None: "cls" for image models that classify from
            their class token, "last" elsewhere.
        final_norm: "include" counts the final norm as part of the last block (paper eq. 7), "exclude" does not, "drop"
            leaves the last block out. "auto": "include" for language models that have one, "exclude" for others.
        svd: how singular vectors are found: "full" decomposition; "krylov", which without a perfect certificate is
            done again in full; "matrix-free", from products with Jacobians that are never formed, where nothing proves
            that no vector was missed; "auto": what is expected to cost least.
        dtype: float32 or float64.
        precision: of the products that Jacobians in float32 are made of; "tf32" (on GPUs that have it) and "bfloat16"
            are faster and err by what docs/measurements.md says. Everything else stays in `dtype`.
        memory_budget: bytes to work with above the weights, half of them for Jacobians. Less means smaller chunks, and
            a result that is equal to rounding.
        device: where to compute; None: where the model's weights are (the CPU for weights that are all offloaded).
        measures: of "coupling" and "trajectory"; None: both.
        blocks: what `find_blocks` takes or gives, to name the blocks or correct an assumption.
        max_tokens: cut longer prompts to this many tokens, with a notice, instead of refusing those that do not fit.
        window: states in a windowed measure, odd; None: 11 where L >= 20, else the largest odd number <= L/2 + 1.

    Returns:
        A Dataset over prompt, token (the chosen rows), position (all rows), k, layer 1..L, layer_other, depth 0..L.
        Row of a layer pair: the Jacobian described; column (`layer_other`): the basis. Positions that a shorter
        prompt lacks are NaN; so is what is undefined, and `undefined` counts it. Norm-like values are in the units of
        the hidden state, couplings and scores are pure numbers. Attributes carry provenance.

    Raises:
        UsageError: for inputs, settings or models that can't be measured; the message says what to do.
        FloatingPointError: if a block overflows or gives NaN; the message names it.
    """
    started = time.perf_counter()
    measures = chosen_measures(measures)
    settings = Settings(k, tokens, final_norm, svd, dtype, precision, memory_budget, measures, window)
    found = find_blocks(model, blocks)
    device = _device(model, device)
    samples = measure_samples(model, found, batches(model, inputs, tokenizer, max_tokens), settings, device)
    return labelled(samples, model, found, settings, device, inputs, started)


def measure_samples(
    model: nn.Module, blocks: Blocks, calls: Sequence[Batch], settings: "Settings", device: torch.device
) -> list[Sample]:
    """What `measure` measures of each sample, before it is put together: a part of the inputs may be measured elsewhere."""
    with undisturbed(device):
        replica = Replica(model, blocks, settings.dtype, device)
        jacobians = Jacobians(replica, settings.precision, settings.memory(4))
        return _measure_batches(jacobians, calls, settings)


def labelled(
    samples: Sequence[Sample],
    model: nn.Module,
    blocks: Blocks,
    settings: "Settings",
    device: torch.device,
    inputs: Any,
    started: float,
) -> xr.Dataset:
    """One Dataset of all samples, with the provenance of a measurement that began at `started` (`time.perf_counter`)."""
    tokens = settings.chosen_tokens(blocks)
    dataset = assemble(samples)
    dataset.attrs |= describe(model, device) | {
        "blocks_found_by": blocks.found_by,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "tokens": tokens if isinstance(tokens, str) else ", ".join(map(str, tokens)),
        "measures": ", ".join(settings.measures),
        "svd": settings.svd,
        "precision": settings.precision,
        "inputs_sha256": digest(inputs),
        "seconds": time.perf_counter() - started,
    }
    return dataset


def chosen_measures(measures: str | Sequence[str] | None) -> tuple[str, ...]:
    """What a caller who names one, several or none means."""
    return MEASURES if measures is None else (measures,) if isinstance(measures, str) else tuple(measures)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is None:
        devices = (parameter.device for parameter in model.parameters())
        device = next((device for device in devices if device.type != "meta"), "cpu")  # meta: offloaded
    return usable_device(device, f"device={str(device)!r}")


@dataclass(frozen=True)
class Settings:
    """What is asked of a measurement, checked; what depends on the model is resolved against a recording.

    The fields are the arguments of `measure`.
    """

    k: int | Sequence[int] | None = None
    tokens: str | Sequence[int] | None = None
    final_norm: FinalNorm = "auto"
    svd: Method = "auto"
    dtype: torch.dtype = torch.float32
    precision: Precision = "float32"
    memory_budget: int = MEMORY_BUDGET
    measures: tuple[str, ...] = MEASURES
    window: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise UsageError(f"dtype={self.dtype!r}; measurements are made in torch.float32 or torch.float64")
        if self.final_norm not in ("auto", "include", "exclude", "drop"):
            raise UsageError(f"final_norm={self.final_norm!r}; choose 'auto', 'include', 'exclude' or 'drop'")
        if self.svd not in METHODS:
            raise UsageError(f"svd={self.svd!r}; choose from {', '.join(METHODS)}")
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision={self.precision!r}; choose from {', '.join(PRECISIONS)}")
        if self.precision != "float32" and self.dtype != torch.float32:
            raise UsageError(f"precision={self.precision!r} is a way to find Jacobians in float32; leave dtype out")
        if not isinstance(self.memory_budget, int) or self.memory_budget < 1:
            raise UsageError(f"memory_budget={self.memory_budget!r}; give a whole number of bytes")
        if not self.measures or set(self.measures) - set(MEASURES):
            raise UsageError(f"measures={self.measures!r}; choose from {', '.join(MEASURES)}")
        if self.window is not None and (self.window < 3 or self.window % 2 == 0):
            raise UsageError(f"window={self.window}; a window is an odd number of states, at least 3")

    def memory(self, part: int) -> int:
        """One `part`-th of the memory budget, in scalars."""
        return self.memory_budget // self.dtype.itemsize // part

    def chosen_tokens(self, blocks: Blocks) -> str | Sequence[int]:
        """The class token of models that classify from it, unless something else was asked for."""
        return self.tokens if self.tokens is not None else "last" if blocks.class_token is None else "cls"

    def ks(self, d: int) -> tuple[int, ...]:
        """The numbers of singular vectors, ascending."""
        if self.k is None:
            return tuple(K for K in RELEASE_K if d >= K) or (max(1, d // 2),)
        ks = whole_numbers(self.k)
        if not ks or not all(1 <= K <= d for K in ks):
            raise UsageError(f"k={self.k!r}; each K must be a whole number from 1 to the model's width d = {d}")
        return tuple(sorted(set(ks)))

    def convention(self, recording: Recording, include: bool) -> str:
        """The final-norm convention, where `include` is the model's default."""
        choice = self.final_norm
        if choice == "auto":
            choice = "include" if include and recording.final_norm else "exclude"
        if choice == "include" and recording.final_norm is None:
            raise UsageError(
                "final_norm='include', but no norm layer takes the last block's output in this model; use 'exclude'"
            )
        if choice == "drop" and len(recording.calls) < 2:
            raise UsageError("final_norm='drop' leaves the last block out, but the model has only one block")
        return choice


def _measure_batches(jacobians: Jacobians, calls: Sequence[Batch], settings: Settings) -> list[Sample]:
    """Everything about the samples of the forward calls; several recordings share a pass over the blocks' weights."""
    samples: list[Sample] = []
    held: list[tuple[Recording, Rows]] = []
    waiting: list[Sample] = []  # for the couplings of the held rows, in their order
    for i, batch in enumerate(calls):
        recording, rows, of_batch = _record(jacobians.replica, batch, settings)
        samples += of_batch
        if "coupling" in settings.measures:
            held.append((recording, rows))
            waiting += [of_batch[b] for b in rows.sample.tolist()]
            full = sum(recording.scalars() for recording, _ in held) >= settings.memory(4)
            enough = rows_at_once(recording, of_batch[0].ks, settings.svd, settings.memory(2))
            if full or len(waiting) >= enough or i == len(calls) - 1:
                couplings = depthwise_couplings(jacobians, held, of_batch[0].ks, settings.svd, settings.memory(2))
                for sample, values in zip(waiting, couplings, strict=True):
                    sample.add_token(values)
                held, waiting = [], []
    for sample in samples:
        sample.fallbacks |= jacobians.fallbacks
    return samples


def _record(replica: Replica, batch: Batch, settings: Settings) -> tuple[Recording, Rows, list[Sample]]:
    """One forward call, the rows asked for in it, and its samples with all but their couplings."""
    recording = record(
        replica,
        [_convert(replica, argument) for argument in batch.arguments],
        {name: _convert(replica, value) for name, value in batch.keywords.items()},
        settings.memory_budget // 4,
    )
    convention = settings.convention(recording, replica.description.include_final_norm)
    norm = recording.final_norm[0] if recording.final_norm else ""
    if convention == "drop":
        recording = recording.without_last_block()
    raw, depth = recording, len(recording.calls)
    if convention == "include":
        recording = recording.fold_final_norm()
    B, n, d = raw.calls[0].x.shape
    if B != len(batch.labels):
        raise UsageError(
            f"the blocks take {B} samples of {n} tokens, but {len(batch.labels)} were given: are their hidden states "
            "(tokens, batch, width)? Say so: blocks=find_blocks(model, batch_first=False)"
        )
    valid = torch.ones(B, n, dtype=torch.bool) if batch.valid is None else batch.valid.cpu()
    valid = [torch.nonzero(row).squeeze(-1).tolist() for row in valid]
    tokens = settings.chosen_tokens(replica.description)
    chosen = [positions(tokens, at, replica.description.class_token) for at in valid]
    window = settings.window or trajectory.default_width(depth)
    if settings.window is not None and window > depth + 1:
        raise UsageError(f"window={window} states, but a trajectory through this model has {depth + 1}")
    ks = settings.ks(d)

    attributes = {
        "final_norm": convention,
        "final_norm_module": norm,
        "window": window,
        "blocks": ", ".join(call.name for call in recording.calls),
    }
    samples = [Sample(label, n, at, ks, attributes) for label, at in zip(batch.labels, chosen, strict=True)]
    if "trajectory" in settings.measures:
        at_once = max(1, settings.memory(16) // ((depth + 1) * d))  # several copies of as many are made
        for b, sample in enumerate(samples):
            parts = [slice(start, start + at_once) for start in range(0, n, at_once)]
            some = [
                _trajectory(
                    recording.states(b, part, replica.device), raw.states(b, part, replica.device), window=window
                )
                for part in parts
            ]
            padding = np.ones(n, dtype=bool)
            padding[valid[b]] = False
            for name in some[0]:
                values = np.concatenate([of_part[name] for of_part in some], axis=-1)
                sample.values[name] = np.where(padding, np.nan, values)
    rows = torch.tensor([(b, t) for b, at in enumerate(chosen) for t in at], device=replica.device)
    return recording, Rows(*rows.unbind(1)), samples


def _trajectory(states: Tensor, raw: Tensor, window: int) -> dict[str, np.ndarray]:
    """Trajectory measures of tokens: states with the final norm as the convention has it, and without."""
    measured = {
        "lss": trajectory.lss(states),
        "lss_window": trajectory.lss_window(states, window),
        "expodistance": trajectory.expodistance(states),
        "expodistance_raw": trajectory.expodistance(raw),
        "expodistance_window": trajectory.expodistance_window(states, window),
        "expodistance_raw_window": trajectory.expodistance_window(raw, window),
        "alpha_mean": trajectory.alphas(states).mean(0),
        "alpha_mean_raw": trajectory.alphas(raw).mean(0),
        "equidistance": trajectory.equidistance(states),
        "equidistance_raw": trajectory.equidistance(raw),
        "norm": trajectory.norms(states),
        "norm_raw": trajectory.norms(raw),
    }
    return {name: value.cpu().numpy() for name, value in measured.items()}


def _convert(replica: Replica, value: Any) -> Any:
    return replica.convert(value) if isinstance(value, Tensor) else value
