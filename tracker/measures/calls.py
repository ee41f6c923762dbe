"""Record the forward calls and measure their samples.

`record_call` records one call, resolves what depends on it (whether the final norm counts, padding, the tokens that are measured)
and measures what is read off its states. `measure_calls` goes through all calls: those whose rows are measured together share a
pass over the blocks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from tracker.blocks.chain import check_chain
from tracker.blocks.reachability import check_reachability
from tracker.blocks.tokens import chosen_positions
from tracker.common.errors import UsageError, warn_caller
from tracker.common.progress import Progress
from tracker.common.values import FinalNorm
from tracker.jacobians.rows import Jacobians
from tracker.jacobians.slicing import Rows
from tracker.jacobians.witness import Findings, Witness
from tracker.measures import trajectory
from tracker.measures.dataset import Sample
from tracker.measures.depthwise import depthwise_couplings
from tracker.measures.equal_blocks import ATTRIBUTE, NONE, equal_blocks
from tracker.measures.layers import check_kept
from tracker.measures.plan import Plan, make_plan
from tracker.measures.post_norm import warn_of_norms
from tracker.measures.settings import Settings
from tracker.measures.states import measure_states, warn_of_missing_logits
from tracker.measures.tokenwise import Selected, links_of, tokenwise_couplings, tokenwise_steps
from tracker.model.description import Blocks
from tracker.model.inputs import Batch
from tracker.model.padding import read_padding
from tracker.model.recorder import record
from tracker.model.recording import Recording
from tracker.model.replica import Replica
from tracker.spans.recording import record_spans


def resolve_final_norm(option: FinalNorm, recording: Recording, blocks: Blocks) -> tuple[str, str]:
    """Return the convention, "include" or "exclude", and why it is used.

    Raises:
        UsageError: if the option asks for what this model does not have.
    """
    norm = recording.final_norm[0] if recording.final_norm else ""
    if option == "include" and not norm:
        raise UsageError(
            "final_norm='include', but no norm layer takes the last block's output in this model; use 'exclude'"
        )
    if option != "auto":
        return option, "chosen by the caller"
    if not norm:
        return "exclude", "no norm takes the last block's output"
    if blocks.include_final_norm is None:
        if recording.logits is None:
            reason = "not a language model: no logits over a vocabulary follow for each token"
            return "exclude", reason
        logits = f"{recording.logits} logits follow"
        return "include", f"a language model: {norm} takes the last block's output, {logits}"
    if not blocks.include_final_norm:
        reason = (
            "not a language model: its blocks are not those of a Hugging Face model of token ids"
        )
        return "exclude", reason
    return "include", f"a Hugging Face model of token ids: {norm} takes the last block's output"


def warn_of_missing_norm(recording: Recording, blocks: Blocks) -> None:
    """Warn if a language model maps its last state to logits without a norm that is known."""
    unknown = blocks.include_final_norm is None and recording.final_norm is None
    if unknown and recording.logits is not None:
        norm = " or ".join(blocks.final_norms)
        found = (
            f"the module {norm} does not take" if norm else "no module was found that normalizes"
        )
        warn_caller(
            f"this is a language model ({recording.logits} logits for each token), but {found} the last block's output itself. "
            "Its measures are those without a final norm (final_norm='exclude') and not comparable to those of models whose norm "
            "is found, such as Hugging Face's. If a function computes the norm, or the norm is given chosen tokens, let a module "
            "normalize the output at all tokens; if that module is not found, name it: "
            "blocks=find_blocks(model, final_norm='NAME')"
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
    """Record one forward call; return its requested rows and its samples, measured except for their couplings.

    Args:
        memory: bytes to keep in memory; the rest go to files.
    """
    record_blocks = record_spans if replica.description.spans else record
    recording = record_blocks(replica, batch.arguments, batch.keywords, memory)
    convention, reason = resolve_final_norm(settings.final_norm, recording, replica.description)
    norm, _ = recording.final_norm or ("", None)
    depth = len(recording.calls)
    if convention == "include":
        recording = recording.with_final_norm()
    _check_samples(recording, batch, replica.description)
    _, n, d = recording.calls[0].x.shape
    valid, padding = _valid(batch, recording)
    valid = [torch.nonzero(row).squeeze(-1).tolist() for row in valid]
    # Without padding: the random numbers of a sample must not depend on the lengths of the others.
    recording.sample_seeds = batch.sample_seeds(valid, n)
    choice = settings.chosen_tokens(replica.description)
    chosen, tokens = chosen_positions(choice, recording, batch, valid)
    window = settings.window or trajectory.default_width(depth)
    if settings.window is not None and window > depth + 1:
        raise UsageError(
            f"window={window} states, but a trajectory through this model has {depth + 1}"
        )
    ks = settings.ks(d)

    attributes = {
        "final_norm": convention,
        "final_norm_module": norm,
        "final_norm_reason": reason,
        "tokens": tokens,
        "padding": padding,
        "window": window,
        "width": d,
        "dtype": settings.dtype,
        "blocks": ", ".join(call.name for call in recording.calls),
    }
    samples = [
        Sample(label, n, at, ks, attributes, present)
        for label, at, present in zip(batch.labels, chosen, valid, strict=True)
    ]
    # The blocks may take more positions than the prompt has tokens.
    if len(batch.token_texts) == n:
        samples[0].token_texts = batch.token_texts
    if batch.ids is not None:
        for sample, ids in zip(samples, batch.ids.cpu().numpy(), strict=True):
            sample.ids = ids
    basis_layers = settings.basis_layers(depth) if settings.includes("tokenwise") else {}
    read = measure_states(replica, recording, valid, window, settings)
    recording.tail.begin(None)
    digests = batch.sample_digests(valid, n)
    for sample, values, at, digest in zip(samples, read, valid, digests, strict=True):
        sample.values |= values
        sample.digest = digest
        sample.basis_layers, sample.random_seed = basis_layers, recording.seed
        if basis_layers:
            pair_positions = settings.pair_positions(at)
            sample.values["pair_position"] = np.asarray(pair_positions, dtype=np.float32)
    rows = torch.tensor([(b, t) for b, at in enumerate(chosen) for t in at])
    return recording, Rows(*rows.unbind(1)), samples


def _check_samples(recording: Recording, batch: Batch, blocks: Blocks) -> None:
    """Check that the blocks take the samples that were given, batch first."""
    B, n, _ = recording.calls[0].x.shape
    given = len(batch.labels)
    if B == given:
        return
    seen = f"the blocks take {B} samples of {n} tokens, but {given} were given"
    if not blocks.batch_first:
        raise UsageError(f"{seen}. {SEQUENCE_FIRST}")
    if n != given:
        raise UsageError(
            f"{seen}: the model makes other samples of them before its blocks (frames, windows, several passes), whose "
            "tokens are not those of one input. Measure the part of the model that takes such samples, on inputs for it"
        )
    # The two axes are exchanged.
    named = blocks.found_by.endswith("named by the caller")
    raise UsageError(
        f"{seen}: are their hidden states (tokens, batch, width)? Then give blocks=find_blocks(model"
        f"{', BLOCKS' * named}, batch_first=False){', with the blocks that you name now as BLOCKS' * named}"
    )


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
    # A decoder's mask has another name: this one is of the encoder's tokens, even where the lengths agree.
    decoded = batch.keywords.get("decoder_input_ids")
    if batch.valid.shape[1] != n or (decoded is not None and decoded.shape[1] == n):
        raise UsageError(
            f"the attention mask leaves out padding among {batch.valid.shape[1]} tokens, but which of the blocks' {n} tokens "
            "those are is not known; give samples of one length, without padding"
        )
    return batch.valid.cpu(), "attention_mask"


# A forward call, its requested rows and its samples
Recorded = tuple[Recording, Rows, list[Sample]]


def measure_calls(
    replica: Replica, calls: Sequence[Batch], settings: Settings, progress: Progress
) -> list[Sample]:
    """Measure the samples of the forward calls, inside the context of `prepare`."""
    memory = settings.memory(4)  # of the recordings, and of forming Jacobians
    jacobians = Jacobians(
        replica, settings.precision, memory, progress.advance, settings.derivative
    )
    samples: list[Sample] = []
    pending: list[Recorded] = []  # calls whose Jacobians are still to be measured
    plan, steps = None, 0  # steps of the progress, for the calls recorded so far
    equal, findings = NONE, Findings()
    calls, i = list(calls), 0
    while i < len(calls):
        batch = calls[i]
        # What other recordings hold of the memory, this one can't have.
        held = sum(recording.nbytes() for recording, *_ in pending)
        recording, rows, of_batch = record_call(replica, batch, settings, max(0, memory - held))
        if recording.seed is not None and len(of_batch) > 1:
            # So that the random numbers of a sample do not depend on the others: training runs divide them among ranks.
            calls[i : i + 1] = batch.by_sample()
            continue
        if plan is None:
            plan = _plan_of_first(replica, batch, recording, settings, len(rows) * len(calls))
            equal = equal_blocks(recording)
        valid = [sample.valid for sample in of_batch]
        witness = Witness(
            replica,
            batch,
            recording,
            rows,
            valid,
            findings,
            settings.witness,
            gradients=settings.forms_jacobians,
        )
        jacobians.witnesses.append(witness)
        # Else its answers are judged when Jacobians are formed.
        if not settings.includes("coupling"):
            for l in witness.wrong:
                witness.require_values(l)
        samples += of_batch
        steps += _steps(rows, of_batch, settings, plan)
        progress.expect(steps * sum(len(call.labels) for call in calls) / len(samples))
        if settings.forms_jacobians:
            pending.append((recording, rows, of_batch))
            # Rows of several calls share a pass over the blocks, and with it the blocks' weights and launches.
            full = held + recording.nbytes() >= memory
            if full or _are_enough(pending, settings, plan) or i == len(calls) - 1:
                _measure_jacobians(jacobians, pending, settings, plan)
                pending = []
        else:
            progress.advance(len(of_batch))
        if not pending:
            jacobians.witnesses = []  # with what they hold of the recordings
        i += 1
    notes = _notes(jacobians)
    # Equal for all samples, so that the Dataset has them once.
    of_blocks: dict[str, int | str] = {ATTRIBUTE: equal, "witness": str(findings)}
    if jacobians.through_norms is not None:
        of_blocks["post_norm"] = int(jacobians.through_norms)
    if jacobians.through_norms:
        warn_of_norms()
    elif settings.final_norm == "auto":  # a norm that ends the last block is no final norm
        warn_of_missing_norm(recording, replica.description)
    for sample in samples:
        sample.attributes |= of_blocks
        sample.notes = notes
    return samples


def _plan_of_first(
    replica: Replica, batch: Batch, recording: Recording, settings: Settings, rows: int
) -> Plan:
    """Return the plan of a measurement, after checks of its first recorded call that hold for the others, and warnings.

    Args:
        rows: the rows of all calls, if they are like this one.
    """
    d, L = recording.calls[0].x.shape[-1], len(recording.calls)
    normed = recording.normed_last is not None
    plan = make_plan(settings, d, L, normed, replica.device)
    check_kept(settings, d, L, rows)
    warn_of_missing_logits(recording, settings)
    # After recording, whose errors are clearer.
    check_reachability(replica, batch, class_token_by_default=settings.tokens is None)
    check_chain(replica, recording, batch)
    return plan


def _notes(jacobians: Jacobians) -> dict[str, dict[int, str]]:
    """Return what is noted of layers, by attribute of the Dataset."""
    checks = jacobians.independent.items()
    return {
        "fallbacks": jacobians.fallbacks,
        "independent_checks": {layer: f"{check.method}: {check.reason}" for layer, check in checks},
    }


def _are_enough(pending: Sequence[Recorded], settings: Settings, plan: Plan) -> bool:
    """Whether the rows of the calls are as many as are measured together."""
    if settings.includes("coupling"):
        return sum(len(rows) for _, rows, _ in pending) >= plan.rows
    T = len(pending[0][2][0].values["pair_position"])
    return sum(len(samples) for *_, samples in pending) >= plan.samples(links_of(T))


def _measure_jacobians(
    jacobians: Jacobians, pending: Sequence[Recorded], settings: Settings, plan: Plan
) -> None:
    """Add the couplings across tokens and across blocks to the samples of recorded calls."""
    samples = [sample for *_, of_call in pending for sample in of_call]
    if basis_layers := samples[0].basis_layers:
        selected = [
            Selected(recording, b, sample.values["pair_position"].astype(int).tolist())
            for recording, _, of_call in pending
            for b, sample in enumerate(of_call)
        ]
        across_tokens = tokenwise_couplings(jacobians, selected, basis_layers, plan)
        for sample, values in zip(samples, across_tokens, strict=True):
            sample.values |= values
    if settings.includes("coupling"):
        rows = [(recording, rows) for recording, rows, _ in pending]
        of_rows = [of_call[b] for _, rows, of_call in pending for b in rows.sample.tolist()]
        # One row after another: a group's Jacobians are freed before those of the next are formed.
        for sample, values in zip(of_rows, depthwise_couplings(jacobians, rows, plan), strict=True):
            sample.add_token(values)


def _steps(rows: Rows, samples: Sequence[Sample], settings: Settings, plan: Plan) -> int:
    """Return the steps of a call, as `Jacobians.advance` counts them; without Jacobians, one per sample."""
    if not settings.forms_jacobians:
        return len(samples)
    steps = len(rows) * plan.steps if settings.includes("coupling") else 0
    for sample in samples:
        if sample.basis_layers:
            steps += tokenwise_steps(len(sample.values["pair_position"]), sample.basis_layers)
    return steps
