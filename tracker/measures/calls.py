"""Whether the final norm counts as part of the last block: `final_norm="auto"` resolved for a model, with the reason in words.

Blocks that end in a norm (post-norm), whose mis-couplings and trajectories read differently.

Record one forward call, and measure what is read off its states.
"""

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from tracker.blocks.find import Blocks
from tracker.capture.confirm import chosen_positions
from tracker.capture.inputs import Batch
from tracker.capture.padding import read_padding
from tracker.capture.recorder import record
from tracker.capture.recording import Recording
from tracker.capture.replica import Replica
from tracker.capture.spans.recording import record_spans
from tracker.common.errors import UsageError
from tracker.common.notices import warn_caller
from tracker.common.values import FinalNorm
from tracker.jacobians.rows import Rows
from tracker.measures import trajectory
from tracker.measures.dataset import Sample
from tracker.measures.settings import Settings
from tracker.measures.states import NOISE, measure_states


def resolve_final_norm(option: FinalNorm, recording: Recording, blocks: Blocks) -> tuple[str, str]:
    """Return the convention, "include", "exclude" or "drop", and why it is used.

    Raises:
        UsageError: if the option asks for what this model does not have.
    """
    norm = recording.final_norm[0] if recording.final_norm else ""
    if option == "include" and not norm:
        raise UsageError(
            "final_norm='include', but no norm layer takes the last block's output in this model; use 'exclude'"
        )
    if option == "drop" and len(recording.calls) < 2:
        raise UsageError("final_norm='drop' leaves the last block out, but the model has only one block")
    if option != "auto":
        return option, "chosen by the caller"
    if not norm:
        return "exclude", "no norm takes the last block's output"
    if blocks.include_final_norm is None:
        if recording.logits is None:
            return "exclude", "not a language model: no logits over a vocabulary follow for each token"
        return "include", f"a language model: {norm} takes the last block's output, {recording.logits} logits follow"
    if not blocks.include_final_norm:
        return "exclude", "not a language model: its blocks are not those of a Hugging Face model of token ids"
    return "include", f"a Hugging Face model of token ids: {norm} takes the last block's output"


def warn_of_missing_norm(recording: Recording, blocks: Blocks) -> None:
    """Warn if a language model maps its last state to logits without a norm that is known."""
    if blocks.include_final_norm is None and recording.logits is not None and recording.final_norm is None:
        warn_caller(
            f"this is a language model ({recording.logits} logits for each token), but no module was found that normalizes the "
            "last block's output. Its measures are those without a final norm (final_norm='exclude') and not comparable to "
            "those of models whose norm is found, such as Hugging Face's. If a function computes the norm, call a module "
            "instead; if a module does, name it: blocks=find_blocks(model, final_norm='NAME')"
        )


def is_post_norm(recording: Recording) -> bool:
    """Whether most blocks return the output of a norm of their residual sum."""
    return 2 * sum(call.ends_in_norm for call in recording.calls) > len(recording.calls)


def warn_of_post_norm(recording: Recording) -> None:
    """Warn that mis-couplings of a post-norm model are far below the null level before any training."""
    if is_post_norm(recording):
        warn_caller(
            "the blocks of this model end in a norm (post-norm, as in BERT): the norm alone gives their Jacobians top singular "
            "vectors in common, so that mis-coupling is far below its null level even untrained. Compare with the same "
            "architecture untrained, not with the null level. A norm also sets the length of every state, so alpha_mean "
            "is about 0 and expodistance is undefined or a constant; read lss. The section on post-norm models in "
            "docs/measurements.md says more"
        )


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
