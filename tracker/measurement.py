"""One model, one set of inputs, one labelled result: the place where the measurements are composed.

For each forward call: record it once (`recording`); from the states the trajectory measures; then, for the token rows of
one call or several, their couplings (`depthwise`); at last one labelled Dataset (`dataset`). Memory: the recordings of
the calls whose rows are measured together (beyond their part of a declared budget, in files), and what their couplings
take, another part of it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tracker.blocks.find import Blocks, Named, find_blocks
from tracker.capture.inputs import Batch, batches, positions
from tracker.capture.reachability import confirm
from tracker.capture.recording import Recording, preserve_global_state, record
from tracker.capture.replica import Replica
from tracker.capture.span_recording import record_spans
from tracker.errors import UsageError
from tracker.jacobians.rows import Jacobians, Precision, Rows
from tracker.measures import trajectory
from tracker.measures.dataset import Sample, assemble
from tracker.measures.depthwise import Method, depthwise_couplings, rows_at_once
from tracker.measures.settings import MEMORY_BUDGET, PAIR_LAYERS, PAIR_TOKENS, FinalNorm, Settings, chosen_measures
from tracker.measures.states import NOISE, readings
from tracker.measures.tokenwise import tokenwise_couplings
from tracker.provenance import describe, digest, usable_device


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
    blocks: Named | Blocks | None = None,
    max_tokens: int | None = None,
    window: int | None = None,
    pair_tokens: int | Sequence[int] = PAIR_TOKENS,
    pair_layers: int | Sequence[tuple[int, int]] = PAIR_LAYERS,
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
            leaves the last block out. "auto": "include" for language models that have one, "exclude" for others. In trained
            models the norm turns the last block's Jacobian into nearly -I, or a multiple of it, with a flat spectrum. So with
            "include" the couplings, singular values and certificates of the layer pairs come both ways: those that end in
            `_raw` are of the last block without the norm, at the cost of one Jacobian more.
        svd: how singular vectors are found: "full" decomposition; "krylov", iteration for the top K, which without a
            perfect certificate is done again another way, in full at last; "matrix-free", from products with Jacobians
            that are never formed, where nothing proves that no vector was missed; "auto": what is expected to cost least.
        dtype: float32 or float64.
        precision: of the products that Jacobians in float32 are made of; "tf32" (on GPUs that have it) and "bfloat16"
            are faster and err by what docs/measurements.md says. Everything else stays in `dtype`.
        memory_budget: bytes to work with above the weights, half of them for Jacobians. Less means smaller chunks, and
            a result that is equal to rounding.
        device: where to compute; None: where the model's weights are (the CPU for weights that are all offloaded).
        measures: of the following, or "all". "coupling" of the blocks and "trajectory" are the usual two (None).
            "vju": coupling beside it with the bases' sides swapped, V^T J U. "matrices": beside it the coupling matrices
            themselves, for the smallest K. "tokenwise": coupling of tokens across blocks. "entropy" of the next token as
            each state has it (models with an unembedding); "pca": states on the principal plane of the last; "noise": how
            far noise on the embeddings turns the states.
        blocks: what `find_blocks` takes or gives, to name the blocks or correct an assumption.
        max_tokens: cut longer prompts to this many tokens, with a notice, instead of refusing those that do not fit.
        window: states in a windowed measure, odd; None: 11 where L >= 20, else the largest odd number <= L/2 + 1.
        pair_tokens: whose Jacobians "tokenwise" compares: how many tokens of each sample, evenly spaced from the first to
            the last, or their positions.
        pair_layers: of which blocks "tokenwise" compares the Jacobians: how far block l', which lends the basis, is from
            block l, which is described (1: l' = l + 1; 0: l' = l), or a list of pairs (l, l') counted from 1, each l once.

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
    pairs = (pair_tokens, pair_layers)
    settings = Settings(k, tokens, final_norm, svd, dtype, precision, memory_budget, measures, window, *pairs)
    found = find_blocks(model, blocks)
    device = _device(model, device)
    samples = measure_samples(model, found, batches(model, inputs, tokenizer, max_tokens), settings, device)
    return labelled(samples, model, found, settings, device, inputs, started)


def measure_samples(
    model: nn.Module, blocks: Blocks, calls: Sequence[Batch], settings: "Settings", device: torch.device
) -> list[Sample]:
    """What `measure` measures of each sample, before it is put together: a part of the inputs may be measured elsewhere."""
    with preserve_global_state(device):
        new_replica = partial(Replica, model, blocks, settings.dtype, device)
        replica = new_replica()
        jacobians = Jacobians(replica, settings.precision, settings.memory(4))
        return _measure_batches(jacobians, calls, settings, new_replica)


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


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is None:
        devices = (parameter.device for parameter in model.parameters())
        device = next((device for device in devices if device.type != "meta"), "cpu")  # meta: offloaded
    return usable_device(device, f"device={str(device)!r}")


def _measure_batches(
    jacobians: Jacobians, calls: Sequence[Batch], settings: Settings, new_replica: Callable[[], Replica]
) -> list[Sample]:
    """Everything about the samples of the forward calls; several recordings share a pass over the blocks' weights."""
    samples: list[Sample] = []
    held: list[tuple[Recording, Rows]] = []
    waiting: list[Sample] = []  # for the couplings of the held rows, in their order
    for i, batch in enumerate(calls):
        room = settings.memory(4) - sum(recording.scalars() for recording, _ in held)
        recording, rows, of_batch = _record(jacobians.replica, batch, settings, max(0, room))
        if i == 0:
            confirm(
                jacobians.replica.description, new_replica, batch.arguments, batch.keywords, settings.tokens is None
            )
        samples += of_batch
        for b, sample in enumerate(of_batch):
            if sample.basis_layers:
                pairs = (sample.values["pair_position"].astype(int).tolist(), sample.basis_layers)
                asked = (sample.ks, settings.svd, settings.asks("matrices"), settings.memory(2))
                sample.values |= tokenwise_couplings(jacobians, recording, b, *pairs, *asked)
        if settings.asks("coupling"):
            held.append((recording, rows))
            waiting += [of_batch[b] for b in rows.sample.tolist()]
            full = sum(recording.scalars() for recording, _ in held) >= settings.memory(4)
            enough = rows_at_once(recording, of_batch[0].ks, settings.svd, settings.memory(2))
            if full or len(waiting) >= enough or i == len(calls) - 1:
                ks, memory = of_batch[0].ks, settings.memory(2)
                couplings = depthwise_couplings(jacobians, held, ks, settings.svd, memory, settings.beside())
                for sample, values in zip(waiting, couplings, strict=True):
                    sample.add_token(values)
                held, waiting = [], []
    for sample in samples:
        sample.fallbacks |= jacobians.fallbacks
    return samples


def _record(replica: Replica, batch: Batch, settings: Settings, room: int) -> tuple[Recording, Rows, list[Sample]]:
    """One forward call, the rows asked for in it, and its samples with all but their couplings.

    Args:
        room: scalars to be kept in memory, the others go to files.
    """
    recording = (record_spans if replica.description.spans else record)(
        replica,
        batch.arguments,
        batch.keywords,
        room * settings.dtype.itemsize,
    )
    convention = settings.convention(recording, replica.description.include_final_norm)
    norm, final_norm = recording.final_norm or ("", None)
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
    valid = _valid(batch, B, n)
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
        "width": d,
        "blocks": ", ".join(call.name for call in recording.calls),
    }
    samples = [Sample(label, n, at, ks, NOISE, attributes) for label, at in zip(batch.labels, chosen, strict=True)]
    basis_layers = settings.basis_layers(depth) if settings.asks("tokenwise") else {}
    read = readings(replica, recording, raw, final_norm, valid, window, settings)
    for sample, values, at in zip(samples, read, valid, strict=True):
        sample.values |= values
        sample.basis_layers = basis_layers
        if basis_layers:
            sample.values["pair_position"] = np.asarray(settings.pairs_of(at), dtype=np.float32)
    rows = torch.tensor([(b, t) for b, at in enumerate(chosen) for t in at], device=replica.device)
    return recording, Rows(*rows.unbind(1)), samples


def _valid(batch: Batch, B: int, n: int) -> Tensor:
    """Which of the blocks' tokens are not padding."""
    if batch.valid is None or batch.valid.all():
        return torch.ones(B, n, dtype=torch.bool)
    decoded = batch.keywords.get("decoder_input_ids")
    if batch.valid.shape[1] != n or (decoded is not None and decoded.shape[1] == n):
        raise UsageError(
            f"the attention mask leaves out padding among {batch.valid.shape[1]} tokens, but which of the blocks' {n} tokens "
            "those are is not known; give samples of one length, without padding"
        )
    return batch.valid.cpu()
