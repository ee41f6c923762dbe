"""Measure the samples of several forward calls: recordings whose rows are measured together share a pass over the blocks."""

from collections.abc import Sequence

from tracker.capture.prepare import Prepared
from tracker.capture.recording import Recording
from tracker.common.progress import Progress
from tracker.jacobians.rows import Jacobians, Rows
from tracker.measures.calls import record_call
from tracker.measures.dataset import Sample
from tracker.measures.depthwise import depthwise_couplings, depthwise_steps, rows_at_once
from tracker.measures.directions import in_words
from tracker.measures.final_norm import warn_of_missing_norm
from tracker.measures.kept import check_kept
from tracker.measures.post_norm import warn_of_post_norm
from tracker.measures.settings import Settings
from tracker.measures.states import warn_of_missing_unembedding
from tracker.measures.tokenwise import Selected, samples_at_once, tokenwise_couplings, tokenwise_steps

Recorded = tuple[Recording, Rows, list[Sample]]  # a forward call, its requested rows and its samples


def measure_calls(prepared: Prepared, settings: Settings, progress: Progress) -> list[Sample]:
    """Measure the samples of the forward calls, inside the context of `prepare`."""
    jacobians = Jacobians(
        prepared.replica, settings.precision, settings.memory(4), progress.advance, settings.derivative
    )
    samples: list[Sample] = []
    pending: list[Recorded] = []  # calls whose Jacobians are still to be measured
    steps = 0  # of the progress, for the calls recorded so far
    calls, i = list(prepared.calls), 0
    while i < len(calls):
        batch = calls[i]
        available = settings.memory(4) - sum(recording.scalars() for recording, *_ in pending)
        recording, rows, of_batch = record_call(jacobians.replica, batch, settings, max(0, available))
        if recording.seed is not None and len(of_batch) > 1:
            # So that the random numbers of a sample do not depend on the others: training runs divide them among ranks.
            calls[i : i + 1] = batch.by_sample()
            continue
        if i == 0:
            check_kept(settings, recording, len(rows) * len(calls))
            warn_of_post_norm(recording)
            warn_of_missing_unembedding(recording, settings)
            if settings.final_norm == "auto":
                warn_of_missing_norm(recording, jacobians.replica.description)
        samples += of_batch
        steps += _steps(recording, rows, of_batch, settings)
        progress.expect(steps * sum(len(call.labels) for call in calls) / len(samples))
        if not settings.forms_jacobians:
            progress.advance(len(of_batch))
        if settings.forms_jacobians:
            pending.append((recording, rows, of_batch))
            full = sum(recording.scalars() for recording, *_ in pending) >= settings.memory(4)
            if full or _are_enough(pending, settings) or i == len(calls) - 1:
                _measure_jacobians(jacobians, pending, settings)
                pending = []
        i += 1
    for sample in samples:
        sample.fallbacks |= jacobians.fallbacks
        sample.independent |= jacobians.independent
        sample.without_halves |= jacobians.without_halves
        sample.decode = None  # samples are sent between processes
    return samples


def _are_enough(pending: Sequence[Recorded], settings: Settings) -> bool:
    """Whether the rows of the calls are as many as are measured together."""
    recording, _, samples = pending[0]
    memory = settings.memory(2)
    if settings.includes("coupling"):
        enough = rows_at_once(recording, samples[0].ks, settings.svd, memory)
        return sum(len(rows) for _, rows, _ in pending) >= enough
    T = len(samples[0].values["pair_position"])
    return sum(len(some) for *_, some in pending) >= samples_at_once(recording, T, memory)


def _measure_jacobians(jacobians: Jacobians, pending: Sequence[Recorded], settings: Settings) -> None:
    """Add the couplings across tokens and across blocks to the samples of recorded calls."""
    samples = [sample for *_, some in pending for sample in some]
    ks, basis_layers, memory = samples[0].ks, samples[0].basis_layers, settings.memory(2)
    if basis_layers:
        selected = [
            Selected(recording, b, sample.values["pair_position"].astype(int).tolist())
            for recording, _, some in pending
            for b, sample in enumerate(some)
        ]
        matrices = settings.includes("matrices")
        across_tokens = tokenwise_couplings(jacobians, selected, basis_layers, ks, settings.svd, matrices, memory)
        for sample, values in zip(samples, across_tokens, strict=True):
            sample.values |= values
    if settings.includes("coupling"):
        rows = [(recording, rows) for recording, rows, _ in pending]
        of_rows = [some[b] for _, rows, some in pending for b in rows.sample.tolist()]
        couplings = depthwise_couplings(jacobians, rows, ks, settings.svd, memory, settings.extras(), settings.keep)
        for sample, values in zip(of_rows, couplings, strict=True):
            sample.add_token(in_words(values, sample.decode))


def _steps(recording: Recording, rows: Rows, samples: Sequence[Sample], settings: Settings) -> int:
    """Return the steps of a call, as `Jacobians.advance` counts them; without Jacobians, one per sample."""
    if not settings.forms_jacobians:
        return len(samples)
    steps, memory, ks = 0, settings.memory(2), samples[0].ks
    if settings.includes("coupling"):
        steps = len(rows) * depthwise_steps(recording, ks, settings.svd, memory, settings.extras())
    for sample in samples:
        if sample.basis_layers:
            steps += tokenwise_steps(len(sample.values["pair_position"]), sample.basis_layers)
    return steps
