"""Record one forward call, and measure what is read off its states."""

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from tracker.capture.confirm import chosen_positions
from tracker.capture.inputs import Batch
from tracker.capture.padding import read_padding
from tracker.capture.recorder import record
from tracker.capture.recording import Recording
from tracker.capture.replica import Replica
from tracker.capture.spans.recording import record_spans
from tracker.common.errors import UsageError
from tracker.jacobians.rows import Rows
from tracker.measures import trajectory
from tracker.measures.dataset import Sample
from tracker.measures.final_norm import resolve_final_norm
from tracker.measures.post_norm import is_post_norm
from tracker.measures.settings import Settings
from tracker.measures.states import NOISE, measure_states

SEQUENCE_FIRST = """\
The blocks are sequence first. If the model itself also takes (tokens, batch, ...), wrap it, because inputs are batch first:
  class BatchFirst(nn.Sequential):
      def forward(self, x): return super().forward(x.transpose(0, 1)).transpose(0, 1)
Then give tracker.measure(BatchFirst(model), x.transpose(0, 1)). If the blocks take (batch, tokens, width) after all, give
blocks=find_blocks(model, batch_first=True)."""


def record_call(
    replica: Replica, batch: Batch, settings: Settings, memory: int
) -> tuple[Recording, Rows, list[Sample]]:
    """Record one forward call; return its requested rows and its samples, measured but for their couplings.

    Args:
        memory: bytes to keep in memory; the rest go to files.
    """
    recording = (record_spans if replica.description.spans else record)(
        replica,
        batch.arguments,
        batch.keywords,
        memory,
    )
    convention, reason = resolve_final_norm(settings.final_norm, recording, replica.description)
    norm, final_norm = recording.final_norm or ("", None)
    if convention == "drop":
        recording = recording.without_last_block()
    depth = len(recording.calls)
    if convention == "include":
        recording = recording.with_final_norm()
    B, n, d = recording.calls[0].x.shape
    if B != len(batch.labels):
        seen = f"the blocks take {B} samples of {n} tokens, but {len(batch.labels)} were given"
        if not replica.description.batch_first:
            raise UsageError(f"{seen}. {SEQUENCE_FIRST}")
        if n != len(batch.labels):
            raise UsageError(
                f"{seen}: the model makes other samples of them before its blocks (frames, windows, several passes), whose "
                "tokens are not those of one input. Measure the part of the model that takes such samples, on inputs for it"
            )
        named = replica.description.found_by.endswith("named by the caller")
        raise UsageError(
            f"{seen}: are their hidden states (tokens, batch, width)? Then give blocks=find_blocks(model"
            f"{', BLOCKS' * named}, batch_first=False){', with the blocks that you name now as BLOCKS' * named}"
        )
    valid, padding = _valid(batch, recording)
    valid = [torch.nonzero(row).squeeze(-1).tolist() for row in valid]
    recording.sample_seeds = batch.sample_seeds(valid, n)
    choice = settings.chosen_tokens(replica.description)
    chosen, tokens = chosen_positions(choice, recording, batch, valid, replica.description.class_token)
    window = settings.window or trajectory.default_width(depth)
    if settings.window is not None and window > depth + 1:
        raise UsageError(f"window={window} states, but a trajectory through this model has {depth + 1}")
    ks = settings.ks(d)

    attributes = {
        "final_norm": convention,
        "final_norm_module": norm,
        "final_norm_reason": reason,
        "post_norm": int(is_post_norm(recording)),
        "tokens": tokens,
        "padding": padding,
        "window": window,
        "width": d,
        "dtype": settings.dtype,
        "blocks": ", ".join(call.name for call in recording.calls),
    }
    of_each = zip(batch.labels, chosen, valid, strict=True)
    samples = [Sample(label, n, at, ks, NOISE, attributes, present) for label, at, present in of_each]
    if len(batch.token_texts) == n:  # the blocks may take more positions than the prompt has tokens
        samples[0].token_texts = batch.token_texts
    samples[0].decode = batch.decode
    if batch.ids is not None:
        for sample, ids in zip(samples, batch.ids.cpu().numpy(), strict=True):
            sample.ids = ids
    basis_layers = settings.basis_layers(depth) if settings.includes("tokenwise") else {}
    read = measure_states(replica, recording, final_norm, valid, window, settings)
    for sample, values, at in zip(samples, read, valid, strict=True):
        sample.values |= values
        sample.basis_layers, sample.random_seed = basis_layers, recording.seed
        if basis_layers:
            sample.values["pair_position"] = np.asarray(settings.pair_positions(at), dtype=np.float32)
    rows = torch.tensor([(b, t) for b, at in enumerate(chosen) for t in at])
    return recording, Rows(*rows.unbind(1)), samples


def _valid(batch: Batch, recording: Recording) -> tuple[Bool[Tensor, "B n"], str]:
    """Return a mask of the blocks' tokens that are not padding, and where it was read: the attribute `padding`.

    What the caller states by an attention mask is not looked for elsewhere.
    """
    B, n, _ = recording.calls[0].x.shape
    if batch.valid is None:
        valid, source = read_padding(recording, batch)
        if valid is not None:
            return valid, source
    if batch.valid is None or batch.valid.all():
        return torch.ones(B, n, dtype=torch.bool), "none"
    decoded = batch.keywords.get("decoder_input_ids")
    if batch.valid.shape[1] != n or (decoded is not None and decoded.shape[1] == n):
        raise UsageError(
            f"the attention mask leaves out padding among {batch.valid.shape[1]} tokens, but which of the blocks' {n} tokens "
            "those are is not known; give samples of one length, without padding"
        )
    return batch.valid.cpu(), "attention_mask"
