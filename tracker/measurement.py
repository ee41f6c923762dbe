"""One model, one set of inputs, one labelled result: the place where the measurements are composed.

For each forward call: record it once (`replica`); from the states the trajectory measures; then, for a group of token
rows at a time, the Jacobian of every block (`rows`), its top-K singular triplets (`svd`), and every layer pair's
coupling (`coupling`). Memory: the Jacobians of one group, L x R x d x d, within a declared budget.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tracker import coupling, trajectory
from tracker.blocks import UsageError, find_blocks
from tracker.inputs import Batch, batches, positions
from tracker.provenance import describe, digest
from tracker.replica import Recording, Replica, record, undisturbed
from tracker.rows import Evidence, Jacobians, Rows
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
    blocks: str | Sequence[str | nn.Module] | None = None,
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
        device: where to compute; None: where the model's weights are.
        measures: of "coupling" and "trajectory"; None: both.
        blocks: see `find_blocks`.
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
    if dtype not in (torch.float32, torch.float64):
        raise UsageError(f"dtype={dtype}; measurements are made in torch.float32 or torch.float64")
    if final_norm not in ("auto", "include", "exclude", "drop"):
        raise UsageError(f"final_norm={final_norm!r}; choose 'auto', 'include', 'exclude' or 'drop'")
    if svd not in ("auto", "full"):
        raise UsageError(f"svd={svd!r}; choose 'auto' or 'full'")
    measures = MEASURES if measures is None else tuple(measures)
    if not measures or set(measures) - set(MEASURES):
        raise UsageError(f"measures={measures!r}; choose from {', '.join(MEASURES)}")
    calls = batches(model, inputs, tokenizer, max_tokens)
    found = find_blocks(model, blocks)
    weight = next(iter(model.parameters()), None)
    device = (
        torch.device(device) if device is not None else weight.device if weight is not None else torch.device("cpu")
    )
    if tokens is None:
        tokens = "last" if found.class_token is None else "cls"

    with undisturbed(device):
        replica = Replica(model, found, dtype, device)
        result = _Result(replica, calls, k, tokens, final_norm, window, measures)
        for batch in calls:
            result.add(batch)
    dataset = result.dataset()
    dataset.attrs |= describe(model, device) | {
        "blocks": ", ".join(found.names),
        "blocks_found_by": found.found_by,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens if isinstance(tokens, str) else ", ".join(map(str, tokens)),
        "inputs_sha256": digest(inputs),
        "seconds": time.perf_counter() - started,
    }
    return dataset


class _Result:
    """Grows by one forward call at a time; the Dataset is stacked from the parts at the end."""

    def __init__(self, replica, calls, k, tokens, final_norm, window, measures):
        self.replica, self.k, self.tokens, self.window, self.measures = replica, k, tokens, window, measures
        self.final_norm: str = final_norm
        self.norm_found: str | None = None
        self.labels = [label for batch in calls for label in batch.labels]
        self.jacobians = Jacobians()
        self.evidence: dict[int, Evidence] = {}
        self.parts: list[dict[str, np.ndarray]] = []  # per sample: name -> values, dimensions as in DIMS
        self.width = self.depth = 0

    def add(self, batch: Batch) -> None:
        recording = record(
            self.replica,
            [_convert(self.replica, argument) for argument in batch.arguments],
            {name: _convert(self.replica, value) for name, value in batch.keywords.items()},
        )
        raw, recording = self._fold(recording)
        _, B, n, d = raw.shape
        self.width, self.depth = d, len(recording.calls)
        self.ks = _chosen_k(self.k, d)
        self.window = _chosen_window(self.window, self.depth)
        valid = torch.ones(B, n, dtype=torch.bool) if batch.valid is None else batch.valid.cpu()
        valid = [torch.nonzero(row).squeeze(-1).tolist() for row in valid]
        class_token = self.replica.description.class_token
        chosen = [positions(self.tokens, at, class_token) for at in valid]
        parts = [{"token_position": np.asarray(at, dtype=np.float32)} for at in chosen]
        if "trajectory" in self.measures:
            states = recording.states
            for b, part in enumerate(parts):
                part.update(_trajectory(states[:, b], raw[:, b], valid[b], self.window, n))
        if "coupling" in self.measures:
            samples = torch.tensor([b for b, at in enumerate(chosen) for _ in at], device=raw.device)
            rows = Rows(samples, torch.tensor([t for at in chosen for t in at], device=raw.device))
            owners = samples.tolist()
            for row, values in zip(owners, self._couplings(recording, rows), strict=True):
                for name, value in values.items():
                    parts[row].setdefault(name, []).append(value)  # type: ignore[union-attr, arg-type]
        self.parts += [{name: np.asarray(value) for name, value in part.items()} for part in parts]

    def _fold(self, recording: Recording) -> tuple[Tensor, Recording]:
        """Apply the final-norm convention; returns the states before the norm, and the recording to measure."""
        choice, found = self.final_norm, recording.final_norm
        if choice == "auto":
            choice = "include" if found and self.replica.description.include_final_norm else "exclude"
        if choice == "include" and found is None:
            raise UsageError(
                "final_norm='include', but no norm layer takes the last block's output in this model; use 'exclude'"
            )
        if choice == "drop":
            if len(recording.calls) < 2:
                raise UsageError("final_norm='drop' leaves the last block out, but the model has only one block")
            recording = Recording(recording.calls[:-1], None, None)
        self.final_norm, self.norm_found = choice, found[0] if found else None
        return recording.states, recording.fold_final_norm() if choice == "include" else recording

    def _couplings(self, recording: Recording, rows: Rows) -> Iterator[dict[str, np.ndarray]]:
        """For every row, its coupling measures; a group of rows at a time, so that their Jacobians fit the budget."""
        L, d = len(recording.calls), self.width
        group = max(1, JACOBIAN_BUDGET // (L * d * d))
        for start in range(0, len(rows.sample), group):
            some = Rows(rows.sample[start : start + group], rows.token[start : start + group])
            J, triplets, errors = [], [], []
            for call in recording.calls:
                with self.replica.weights(call.block), self.replica.weights(call.final_norm or nn.Identity()):
                    J_l, evidence = self.jacobians(call, some)
                if not torch.isfinite(J_l).all():
                    raise FloatingPointError(
                        f"the Jacobian of block {call.layer} ({call.name}) is not finite (overflow or NaN)"
                    )
                self._note(call.layer, call.name, evidence)
                J.append(J_l)
                triplets.append(top_singular_triplets(J_l, max(self.ks)))
                errors.append(evidence)
            for r in range(len(some.sample)):
                U, S, V = (torch.stack([getattr(t, part)[r] for t in triplets]) for part in "USV")
                values = _pairs(torch.stack([J_l[r] for J_l in J]), U, S, V, self.ks)
                values["residual"] = torch.stack([t.residual[r] for t in triplets])
                values["complete"] = torch.stack([t.complete[r] for t in triplets])
                values["sliced"] = torch.tensor([e.sliced for e in errors])
                values["value_error"] = torch.tensor([e.value_error for e in errors])
                values["derivative_error"] = torch.tensor([e.derivative_error for e in errors])
                yield {name: value.cpu().numpy() for name, value in values.items()}

    def _note(self, layer: int, name: str, evidence: Evidence) -> None:
        if not evidence.sliced and not any(not e.sliced for e in self.evidence.values()):
            warnings.warn(
                f"block {layer} ({name}) is measured over the full sequence, slowly: {evidence.reason}", stacklevel=6
            )
        if not evidence.sliced or layer not in self.evidence:
            self.evidence[layer] = evidence

    def dataset(self) -> xr.Dataset:
        names = [name for name in DIMS if name in self.parts[0]]
        n = max((len(part["norm_raw"][0]) for part in self.parts if "norm_raw" in part), default=0)
        sizes = {"position": n, "token": max(len(part["token_position"]) for part in self.parts)}
        variables = {
            name: (("prompt", *DIMS[name]), np.stack([_padded(part[name], DIMS[name], sizes) for part in self.parts]))
            for name in names
        }
        coords = {
            "prompt": np.arange(len(self.parts)),
            "prompt_text": ("prompt", np.asarray(self.labels, dtype=object)),
            "token": np.arange(sizes["token"]),
            "layer": np.arange(1, self.depth + 1),
        }
        if "coupling" in self.measures:
            coords |= {"k": list(self.ks), "layer_other": coords["layer"], "rank": np.arange(1, max(self.ks) + 1)}
        if "trajectory" in self.measures:
            coords |= {"position": np.arange(n), "depth": np.arange(self.depth + 1)}
        dataset = xr.Dataset(variables, coords)
        dataset["undefined"] = _undefined(dataset)
        dataset.attrs = {
            "final_norm": self.final_norm,
            "final_norm_module": self.norm_found or "",
            "window": self.window,
            "measures": ", ".join(self.measures),
            "fallbacks": json.dumps({layer: e.reason for layer, e in self.evidence.items() if not e.sliced}),
            "completeness": "exact",
            "svd": "full",
        }
        return dataset


PAIR = ("token", "k", "layer", "layer_other")
DIMS: dict[str, tuple[str, ...]] = {
    "token_position": ("token",),
    **{name: PAIR for name in coupling.MEASURES},
    **{f"{name}_null": PAIR[:-1] for name in coupling.MEASURES},
    "singular_value": ("token", "layer", "rank"),
    **dict.fromkeys(("residual", "complete", "sliced", "value_error", "derivative_error"), ("token", "layer")),
    **dict.fromkeys(("lss", "expodistance", "expodistance_raw", "alpha_mean", "alpha_mean_raw"), ("position",)),
    **dict.fromkeys(("equidistance", "equidistance_raw"), ("position",)),
    **dict.fromkeys(("lss_window", "expodistance_window", "expodistance_raw_window"), ("layer", "position")),
    **dict.fromkeys(("norm", "norm_raw"), ("depth", "position")),
}


def _pairs(J: Tensor, U: Tensor, S: Tensor, V: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """All couplings of one row: J (L, d, d), U and V (L, d, K), S (L, K); values over (k, layer, layer_other)."""
    A = coupling.coupling_matrices(J, U, V)
    frobenius = torch.linalg.matrix_norm(J)
    by_k = [
        coupling.miscouplings(A[..., :k, :k], S[:, :k])
        | {f"{name}_null": v for name, v in coupling.null_levels(S[:, :k], frobenius, J.shape[-1]).items()}
        for k in ks
    ]
    values = {name: torch.stack([of_k[name] for of_k in by_k]) for name in by_k[0]}
    values["singular_value"] = S
    return values


def _trajectory(states: Tensor, raw: Tensor, valid: list[int], window: int, n: int) -> dict[str, np.ndarray]:
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
    padding = torch.ones(n, dtype=torch.bool, device=states.device)
    padding[valid] = False
    return {name: value.masked_fill(padding, torch.nan).cpu().numpy() for name, value in measured.items()}


def _padded(value: np.ndarray, dims: Sequence[str], sizes: Mapping[str, int]) -> np.ndarray:
    """Fill the ragged axes (positions, tokens) up with NaN."""
    missing = [(0, sizes.get(dim, length) - length) for dim, length in zip(dims, value.shape, strict=True)]
    if not any(after for _, after in missing):
        return value
    return np.pad(value.astype(np.result_type(value, np.float32)), missing, constant_values=np.nan)


def _undefined(dataset: xr.Dataset) -> xr.DataArray:
    """How many values of each measure are undefined, not counting what a shorter prompt lacks."""
    counts = {}
    if "lss" in dataset:
        there = dataset["norm_raw"].isel(depth=0).notnull()
        names = ("lss", "expodistance", "expodistance_raw", "equidistance", "equidistance_raw")
        counts |= {name: int((dataset[name].isnull() & there).sum()) for name in names}
    if "miscoupling" in dataset:
        there = dataset["token_position"].notnull()
        counts |= {name: int((dataset[name].isnull() & there).sum()) for name in coupling.MEASURES}
    return xr.DataArray(list(counts.values()), {"quantity": list(counts)}, "quantity")


def _chosen_k(k: int | Sequence[int] | None, d: int) -> tuple[int, ...]:
    if k is None:
        return tuple(K for K in RELEASE_K if d >= K) or (max(1, d // 2),)
    ks = tuple(sorted({k} if isinstance(k, int) else set(k)))
    if not ks or not all(isinstance(K, int) and 1 <= K <= d for K in ks):
        raise UsageError(f"k={k}; each K must be a whole number from 1 to the model's width d = {d}")
    return ks


def _chosen_window(window: int | None, L: int) -> int:
    window = trajectory.default_width(L) if window is None else window
    if window < 3 or window % 2 == 0:
        raise UsageError(f"window={window}; a window is an odd number of states, at least 3")
    return window


def _convert(replica: Replica, value: Any) -> Any:
    return replica.convert(value) if isinstance(value, Tensor) else value
