"""One model, one set of inputs, one labelled result: the place where the measurements are composed.

For each forward call: record it once (`replica`); from the states the trajectory measures; then, for a group of token
rows at a time, the Jacobian of every block (`rows`), its top-K singular triplets (`svd`), and every layer pair's
coupling (`coupling`); at last one labelled Dataset (`dataset`). Memory: the Jacobians of one group, L x R x d x d,
within a declared budget.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tracker import coupling, trajectory
from tracker.blocks import Blocks, UsageError, find_blocks
from tracker.dataset import Sample, assemble
from tracker.inputs import Batch, batches, positions, whole_numbers
from tracker.provenance import describe, digest
from tracker.replica import Recording, Replica, record, undisturbed
from tracker.rows import Jacobians, Rows
from tracker.svd import top_singular_triplets

RELEASE_K = (10, 30, 50)
MEASURES = ("coupling", "trajectory")
JACOBIAN_BUDGET = 1 << 29  # scalars of all Jacobians held at once: 2 GB in float32

FinalNorm = Literal["auto", "include", "exclude", "drop"]


def measure(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Callable[..., Mapping[str, Tensor]] | None = None,
    k: int | Sequence[int] | None = None,
    tokens: str | Sequence[int] | None = None,
    final_norm: FinalNorm = "auto",
    svd: Literal["auto", "full"] = "auto",
    dtype: torch.dtype = torch.float32,
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
        dtype: float32 or float64.
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
    settings = Settings(k, tokens, final_norm, svd, dtype, chosen_measures(measures), window)
    found = find_blocks(model, blocks)
    device = _device(model, device)
    samples = measure_samples(model, found, batches(model, inputs, tokenizer, max_tokens), settings, device)
    return labelled(samples, model, found, settings, device, inputs, started)


def measure_samples(
    model: nn.Module, blocks: Blocks, calls: Sequence[Batch], settings: "Settings", device: torch.device
) -> list[Sample]:
    """What `measure` measures of each sample, before it is put together: a part of the inputs may be measured elsewhere."""
    with undisturbed(device):
        jacobians = Jacobians(Replica(model, blocks, settings.dtype, device))
        return [sample for batch in calls for sample in _measure_batch(jacobians, batch, settings)]


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
        "svd": "full",
        "completeness": "exact",
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
    try:
        device = torch.device(device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device={str(device)!r} can't be used ({str(error).splitlines()[0]})") from error
    return device


@dataclass(frozen=True)
class Settings:
    """What is asked of a measurement, checked; what depends on the model is resolved against a recording.

    The fields are the arguments of `measure`.
    """

    k: int | Sequence[int] | None = None
    tokens: str | Sequence[int] | None = None
    final_norm: FinalNorm = "auto"
    svd: str = "auto"
    dtype: torch.dtype = torch.float32
    measures: tuple[str, ...] = MEASURES
    window: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise UsageError(f"dtype={self.dtype!r}; measurements are made in torch.float32 or torch.float64")
        if self.final_norm not in ("auto", "include", "exclude", "drop"):
            raise UsageError(f"final_norm={self.final_norm!r}; choose 'auto', 'include', 'exclude' or 'drop'")
        if self.svd not in ("auto", "full"):
            raise UsageError(f"svd={self.svd!r}; choose 'auto' or 'full'")
        if not self.measures or set(self.measures) - set(MEASURES):
            raise UsageError(f"measures={self.measures!r}; choose from {', '.join(MEASURES)}")
        if self.window is not None and (self.window < 3 or self.window % 2 == 0):
            raise UsageError(f"window={self.window}; a window is an odd number of states, at least 3")

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


def _measure_batch(jacobians: Jacobians, batch: Batch, settings: Settings) -> list[Sample]:
    """Everything about the samples of one forward call."""
    replica = jacobians.replica
    recording = record(
        replica,
        [_convert(replica, argument) for argument in batch.arguments],
        {name: _convert(replica, value) for name, value in batch.keywords.items()},
    )
    convention = settings.convention(recording, replica.description.include_final_norm)
    norm = recording.final_norm[0] if recording.final_norm else ""
    if convention == "drop":
        recording = recording.without_last_block()
    raw = recording.states
    if convention == "include":
        recording = recording.fold_final_norm()
    _, B, n, d = raw.shape
    if B != len(batch.labels):
        raise UsageError(
            f"the blocks take {B} samples of {n} tokens, but {len(batch.labels)} were given: are their hidden states "
            "(tokens, batch, width)? Say so: blocks=find_blocks(model, batch_first=False)"
        )
    valid = torch.ones(B, n, dtype=torch.bool) if batch.valid is None else batch.valid.cpu()
    valid = [torch.nonzero(row).squeeze(-1).tolist() for row in valid]
    tokens = settings.chosen_tokens(replica.description)
    chosen = [positions(tokens, at, replica.description.class_token) for at in valid]
    window = settings.window or trajectory.default_width(len(recording.calls))
    if settings.window is not None and window > len(raw):
        raise UsageError(f"window={window} states, but a trajectory through this model has {len(raw)}")
    ks = settings.ks(d)

    names = ", ".join(call.name for call in recording.calls)
    attributes = {"final_norm": convention, "final_norm_module": norm, "window": window, "blocks": names}
    samples = [Sample(label, n, at, ks, attributes) for label, at in zip(batch.labels, chosen, strict=True)]
    if "trajectory" in settings.measures:
        states = recording.states
        for b, sample in enumerate(samples):
            sample.values |= _trajectory(states[:, b], raw[:, b], valid[b], window)
    if "coupling" in settings.measures:
        owners = [b for b, at in enumerate(chosen) for _ in at]
        at = [t for at in chosen for t in at]
        rows = Rows(torch.tensor(owners, device=raw.device), torch.tensor(at, device=raw.device))
        for b, values in zip(owners, _couplings(jacobians, recording, rows, ks), strict=True):
            samples[b].add_token(values)
    for sample in samples:
        sample.fallbacks |= jacobians.fallbacks
    return samples


def _couplings(
    jacobians: Jacobians, recording: Recording, rows: Rows, ks: Sequence[int]
) -> Iterator[dict[str, np.ndarray]]:
    """The coupling measures of every row; a group of rows at a time, so that their Jacobians fit the budget."""
    L, d = len(recording.calls), recording.calls[0].x.shape[-1]
    group = max(1, JACOBIAN_BUDGET // (L * d * d))
    for start in range(0, len(rows.sample), group):
        some = Rows(rows.sample[start : start + group], rows.token[start : start + group])
        J, triplets, evidence = [], [], []
        for call in recording.calls:
            J_l, evidence_l = jacobians(call, some)
            J.append(J_l)
            triplets.append(top_singular_triplets(J_l, max(ks)))
            evidence.append(evidence_l)
        for r in range(len(some.sample)):
            U, S, V = (torch.stack([getattr(t, part)[r] for t in triplets]) for part in "USV")
            values = _pairs(torch.stack([J_l[r] for J_l in J]), U, S, V, ks)
            values["residual"] = torch.stack([t.residual[r] for t in triplets])
            values["complete"] = torch.stack([t.complete[r] for t in triplets])
            values["sliced"] = torch.tensor([e.sliced for e in evidence])
            values["value_error"] = torch.tensor([e.value_error for e in evidence])
            values["derivative_error"] = torch.tensor([e.derivative_error for e in evidence])
            yield {name: value.cpu().numpy() for name, value in values.items()}


def _pairs(J: Tensor, U: Tensor, S: Tensor, V: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """All couplings of one row: J (L, d, d), U and V (L, d, K), S (L, K); values over (k, layer, layer_other)."""
    A = coupling.coupling_matrices(J, U, V)
    frobenius = torch.linalg.matrix_norm(J)
    by_k = [
        coupling.miscouplings(A[..., :k, :k], S[:, :k], J.shape[-1])
        | {f"{name}_null": v for name, v in coupling.null_levels(S[:, :k], frobenius, J.shape[-1]).items()}
        for k in ks
    ]
    values = {name: torch.stack([of_k[name] for of_k in by_k]) for name in by_k[0]}
    values["singular_value"] = S
    return values


def _trajectory(states: Tensor, raw: Tensor, valid: list[int], window: int) -> dict[str, np.ndarray]:
    """Trajectory measures of one sample: states with the final norm as the convention has it, and without."""
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
    padding = torch.ones(states.shape[1], dtype=torch.bool, device=states.device)
    padding[valid] = False
    return {name: value.masked_fill(padding, torch.nan).cpu().numpy() for name, value in measured.items()}


def _convert(replica: Replica, value: Any) -> Any:
    return replica.convert(value) if isinstance(value, Tensor) else value
