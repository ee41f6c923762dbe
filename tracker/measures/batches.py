"""Measure the samples of several forward calls: recordings whose rows are measured together share a pass over the blocks."""

from collections.abc import Sequence

from tracker.capture.prepare import Prepared
from tracker.capture.recording import Recording
from tracker.common.progress import Progress
from tracker.jacobians.rows import Jacobians, Rows
from tracker.measures.calls import record_call, warn_of_missing_norm, warn_of_post_norm
from tracker.measures.dataset import Sample
from tracker.measures.depthwise import depthwise_couplings
from tracker.measures.directions import in_words
from tracker.measures.layers import check_kept
from tracker.measures.plan import Plan, make_plan
from tracker.measures.settings import Settings
from tracker.measures.states import warn_of_missing_unembedding
from tracker.measures.tokenwise import Selected, links_of, tokenwise_couplings, tokenwise_steps

Recorded = tuple[Recording, Rows, list[Sample]]  # a forward call, its requested rows and its samples


def measure_calls(prepared: Prepared, settings: Settings, progress: Progress) -> list[Sample]:
    """Measure the samples of the forward calls, inside the context of `prepare`."""
    jacobians = Jacobians(
        prepared.replica, settings.precision, settings.memory(4), progress.advance, settings.derivative
    )
    memory = settings.memory(4)  # of the recordings
    samples: list[Sample] = []
    pending: list[Recorded] = []  # calls whose Jacobians are still to be measured
    plan, steps = None, 0  # steps of the progress, for the calls recorded so far
    calls, i = list(prepared.calls), 0
    while i < len(calls):
        batch = calls[i]
        held = sum(recording.nbytes() for recording, *_ in pending)
        recording, rows, of_batch = record_call(jacobians.replica, batch, settings, max(0, memory - held))
        if recording.seed is not None and len(of_batch) > 1:
            # So that the random numbers of a sample do not depend on the others: training runs divide them among ranks.
            calls[i : i + 1] = batch.by_sample()
            continue
        if plan is None:
            plan = make_plan(settings, recording)
            check_kept(settings, recording, len(rows) * len(calls))
            warn_of_post_norm(recording)
            warn_of_missing_unembedding(recording, settings)
            if settings.final_norm == "auto":
                warn_of_missing_norm(recording, jacobians.replica.description)
            prepared.check_reachability()
        samples += of_batch
        steps += _steps(rows, of_batch, settings, plan)
        progress.expect(steps * sum(len(call.labels) for call in calls) / len(samples))
        if not settings.forms_jacobians:
            progress.advance(len(of_batch))
        if settings.forms_jacobians:
            pending.append((recording, rows, of_batch))
            full = sum(recording.nbytes() for recording, *_ in pending) >= memory
            if full or _are_enough(pending, settings, plan) or i == len(calls) - 1:
                _measure_jacobians(jacobians, pending, settings, plan)
                pending = []
        i += 1
    for sample in samples:
        sample.fallbacks |= jacobians.fallbacks
        sample.independent |= jacobians.independent
        sample.without_halves |= jacobians.without_halves
        sample.decode = None  # samples are sent between processes
    return samples


def _are_enough(pending: Sequence[Recorded], settings: Settings, plan: Plan) -> bool:
    """Whether the rows of the calls are as many as are measured together."""
    if settings.includes("coupling"):
        return sum(len(rows) for _, rows, _ in pending) >= plan.rows
    T = len(pending[0][2][0].values["pair_position"])
    return sum(len(samples) for *_, samples in pending) >= plan.samples(links_of(T))


def _measure_jacobians(jacobians: Jacobians, pending: Sequence[Recorded], settings: Settings, plan: Plan) -> None:
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
        for sample, values in zip(of_rows, depthwise_couplings(jacobians, rows, plan), strict=True):
            sample.add_token(in_words(values, sample.decode))


def _steps(rows: Rows, samples: Sequence[Sample], settings: Settings, plan: Plan) -> int:
    """Return the steps of a call, as `Jacobians.advance` counts them; without Jacobians, one per sample."""
    if not settings.forms_jacobians:
        return len(samples)
    steps = len(rows) * plan.steps if settings.includes("coupling") else 0
    for sample in samples:
        if sample.basis_layers:
            steps += tokenwise_steps(len(sample.values["pair_position"]), sample.basis_layers)
    return steps
