"""The expected cost of a measurement, as a dry run returns it, from one forward pass and one timed block.

The seconds of a stage are those of the timed block, at up to `ROWS` token rows, times the number of blocks and rows of the
plan. What is done once per block, the check of its derivative, is timed apart from what is done for every row. The estimate
leaves out what does not grow with the model: imports, and the assembly of the Dataset.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor

from tracker.capture.inputs import Batch
from tracker.capture.prepare import Prepared
from tracker.capture.recording import BlockCall, Recording
from tracker.capture.replica import Replica
from tracker.capture.weights import bytes_of, converted_block
from tracker.common.errors import UsageError
from tracker.common.text import duration, entry, size
from tracker.jacobians.halves import HalfJacobians
from tracker.jacobians.restriction import CallRows
from tracker.jacobians.rows import Jacobians, Rows
from tracker.linalg.costs import krylov_is_cheaper
from tracker.linalg.krylov import basis_fits, basis_size
from tracker.measures import block_products, depthwise
from tracker.measures.calls import record_call
from tracker.measures.coupling import moments
from tracker.measures.dataset import Sample
from tracker.measures.depthwise import pairs
from tracker.measures.directions import DIRECTIONS, RANDOM, heads
from tracker.measures.layers import Layer, check_kept, kept_bytes, matrix_free_layer, triplets_of_jacobians
from tracker.measures.plan import Plan, make_plan, measured_calls
from tracker.measures.settings import Settings, choices
from tracker.measures.states import measure_states, measures_of_states
from tracker.measures.tokenwise import Selected, tokenwise_couplings, tokenwise_steps


@dataclass(frozen=True)
class Cost:
    """What a measurement is expected to take; print it to read it.

    Attributes:
        blocks: the blocks, final norm, unembedding and class token that were found.
        samples: number of prompts or images.
        tokens: length of the shortest and of the longest that the model runs on.
        rows: number of tokens whose Jacobians are measured, over all samples.
        final_norm: the convention, "include", "exclude" or "drop", and the norm's module.
        k: the numbers of singular vectors.
        width: the width d of the hidden state.
        method: how singular vectors are found.
        stages: seconds by stage.
        timed: what was timed, in words.
        weights_bytes: bytes of the model's weights.
        peak_bytes: bytes beside the weights at the peak.
        memory_budget: the limit on `peak_bytes` that was asked for.
        not_counted: measures that were not asked for, each of which costs more.
        warnings: what is beyond the budget.
        refused: why the measurement would stop with an error; "" if nothing was found that stops it.
    """

    blocks: str
    samples: int
    tokens: tuple[int, int]
    rows: int
    final_norm: tuple[str, str]
    k: tuple[int, ...]
    width: int
    method: str
    stages: Mapping[str, float]
    timed: str
    weights_bytes: int
    peak_bytes: int
    memory_budget: int
    not_counted: tuple[str, ...]
    warnings: tuple[str, ...] = field(default=())
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of the whole measurement."""
        return sum(self.stages.values(), 0.0)

    def __str__(self) -> str:
        shortest, longest = self.tokens
        length = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
        convention, norm = self.final_norm
        lines = [
            ("refused", self.refused),
            ("blocks", self.blocks),
            (
                "inputs",
                f"{self.samples} of {length}; Jacobians at {self.rows} token{'s' if self.rows != 1 else ''} in all",
            ),
            ("final norm", f"{convention}{f' ({norm})' if norm else ''}"),
            ("K", f"{', '.join(map(str, self.k))} of width {self.width}"),
            ("method", self.method),
            ("time", "" if self.refused else f"about {duration(self.seconds)}: {self._stages()}"),
            ("timed", self.timed),
            (
                "memory",
                f"about {size(self.peak_bytes)} beside the weights ({size(self.weights_bytes)}); memory_budget "
                f"{size(self.memory_budget)}",
            ),
            *(("warning", warning) for warning in self.warnings),
            ("not counted", f"{', '.join(self.not_counted)} (not asked for by measures)" if self.not_counted else ""),
        ]
        return "\n".join(["dry run: nothing was measured", *(entry(label, text) for label, text in lines if text)])

    __repr__ = __str__

    def _stages(self) -> str:
        return ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.stages.items())


def seconds_of_blocks(
    jacobians: Jacobians,
    recording: Recording,
    selections: Sequence[CallRows],
    layer: Layer,
    plan: Plan,
    timed: Callable[[Callable[[], Any]], tuple[float, Any]],
) -> dict[str, float]:
    """Return the seconds that each choice of `measures=` takes for the blocks of a recording, all like one of them.

    Args:
        selections: the call of that block, with each row.
        layer: its Jacobians there.
        timed: function -> its seconds and its result.
    """
    L, choices, halves = len(recording.calls), plan.extras, HalfJacobians(jacobians)
    head = heads([(recording, rows) for _, rows in selections]) if "directions" in choices else None
    stages = {}
    for choice in depthwise.measured(choices):
        if choice == "products":
            decompositions = 2 * len(block_products.depths(L, layer.triplets.V.shape[-2])) - 1
            step, _ = timed(lambda: block_products.Chain().multiply(layer.jacobian()))
            whole, _ = timed(lambda: block_products.of_matrices([layer.jacobian()], 1))
            stages[choice] = (2 * L - 1) * step + decompositions * max(0.0, whole - step)
            continue
        how = ([layer], [selections], [choice], head, plan.memory // 2, halves, min(plan.ks))
        seconds, _ = timed(lambda how=how: depthwise.measure_blocks(*how))
        # Random directions are taken once, not for each block.
        of_each = 2 * DIRECTIONS
        stages[choice] = seconds * ((L * of_each + RANDOM) / (of_each + RANDOM) if choice == "directions" else L)
    return stages


ROWS = 4  # token rows at most that are timed together
BRIEF = 2.0  # seconds below which a timing is repeated, as libraries start up in the first
SVD_COPIES = 4  # arrays of the size of a Jacobian that its decomposition takes

T = TypeVar("T")


@dataclass(frozen=True)
class _Case:
    """What is measured, resolved on one recorded call."""

    jacobians: Jacobians
    recording: Recording  # with the model's number of blocks
    rows: Rows
    sample: Sample
    settings: Settings
    plan: Plan
    total_rows: int
    samples: int

    @property
    def together(self) -> int:
        """The number of rows that are measured together."""
        return min(self.plan.rows, max(1, self.total_rows))


def estimate(prepared: Prepared, settings: Settings, depth: int | None = None) -> Cost:
    """Estimate the cost of measuring forward calls, inside the context of `prepare`.

    Args:
        depth: the number of blocks of the measured model, if the prepared one has fewer, all alike.
    """
    model, blocks, calls = prepared.model, prepared.blocks, prepared.calls
    jacobians = Jacobians(prepared.replica, settings.precision, settings.memory(4), derivative=settings.derivative)
    sizes = [_size(batch) for batch in calls]
    batch = calls[sorted(range(len(calls)), key=sizes.__getitem__)[len(calls) // 2]]
    scale = sum(sizes) / _size(batch)
    states_alone = replace(settings, measures=("coupling",), **({"window": None} if depth else {}))
    stages: dict[str, float] = {}
    refused, warnings, case = "", [], None
    record = partial(record_call, jacobians.replica, batch, memory=settings.memory(4))
    try:
        seconds, (recorded, rows, samples) = _timed_again(partial(record, states_alone))
        recording = recorded if depth is None else _deepened(recorded, depth)
        deeper = len(recording.calls) / len(recorded.calls)
        stages["forward passes"] = seconds * scale * deeper
        count = sum(len(call.labels) for call in calls)
        total_rows = round(len(rows) * (scale if settings.tokens == "all" else count / len(batch.labels)))
        check_kept(settings, recording, total_rows)
        case = _Case(
            jacobians, recording, rows, samples[0], settings, make_plan(settings, recording), total_rows, count
        )
        for measure in measures_of_states(recorded, settings):
            one = replace(states_alone, measures=(measure,))
            stages[measure] = _states_seconds(jacobians.replica, recorded, samples[0], one) * scale * deeper
        if settings.includes("coupling"):
            stages |= _coupling(case)
        if settings.includes("tokenwise"):
            stages |= _tokenwise(case)
    except (UsageError, FloatingPointError) as error:
        refused = str(error)
    lengths = [_length(batch) for batch in calls]
    chosen: dict[str, Any] = {"final_norm": ("", ""), "k": (), "width": 0, "method": ""}
    weights, peak = bytes_of(model, settings.torch_dtype)[0], 0
    if case is not None:
        lengths = [round(case.sample.length * length / _length(batch)) for length in lengths]
        norms = case.sample.attributes["final_norm"], case.sample.attributes["final_norm_module"]
        chosen = {"final_norm": norms, "k": case.plan.ks, "width": case.plan.d}
        chosen["method"] = _method(case)
        peak = _peak(case, len(calls)) + converted_block(model, blocks, settings.torch_dtype)
        peak += kept_bytes(settings, case.recording, case.total_rows)
        one = case.plan.bytes_of_jacobian
        if settings.forms_jacobians and one > settings.memory_budget // 2:
            warnings.append(
                f"one Jacobian takes {size(one)}, more than half of the memory budget, which is what Jacobians may take: "
                "the budget is exceeded; raise it, or choose svd='matrix-free'"
            )
    included = {measure for measure in choices() if settings.includes(measure)}
    return Cost(
        blocks=str(blocks),
        samples=sum(len(call.labels) for call in calls),
        tokens=(min(lengths), max(lengths)),
        rows=case.total_rows if case is not None else 0,
        **chosen,
        stages=stages,
        timed=_timed_text(case, jacobians),
        weights_bytes=weights,
        peak_bytes=peak,
        memory_budget=settings.memory_budget,
        not_counted=tuple(measure for measure in choices() if measure not in included),
        warnings=tuple(warnings),
        refused=refused,
    )


def _states_seconds(replica: Replica, recording: Recording, sample: Sample, settings: Settings) -> float:
    """Return the seconds of a measure that is read off the states of a recorded call."""
    norm = recording.final_norm
    B, n, _ = recording.calls[0].x.shape
    how = ([range(n)] * B, sample.attributes["window"], settings)
    seconds, _ = _timed_again(lambda: measure_states(replica, recording, norm and norm[1], *how))
    return seconds


def _coupling(case: _Case) -> dict[str, float]:
    """Return the seconds of the Jacobians, their singular vectors and the pairs of all blocks."""
    recording, plan = case.recording, case.plan
    calls = measured_calls(recording)
    R, L = min(case.together, ROWS), plan.of_row
    row = case.rows.subset(slice(0, 1))
    middle, other = _middle(calls)

    def form(call: BlockCall) -> Any:
        selections = [(call, row)] * R
        return case.jacobians(selections) if plan.forms else matrix_free_layer(case.jacobians, selections, plan)

    once, formed = _timed_after_warm_up(form, middle, other)
    every = once
    if case.total_rows > R:  # without what is done once per block
        every, formed = _timed(lambda: form(middle if once >= BRIEF else other))
    factor = case.total_rows / R
    seconds = L * (max(0.0, once - every) + factor * every)
    if not plan.forms:
        layer, stages = formed, {"singular vectors": seconds}
    else:
        stages = {"Jacobians": seconds}
        J = torch.cat([J for J, _ in formed])
        parallel = min(L, torch.get_num_threads()) if plan.kept == "device" and J.device.type == "cpu" else 1
        seconds, (triplets, *_) = _timed_again(
            lambda: triplets_of_jacobians([J] * parallel, plan, case.jacobians.advance)
        )
        stages["singular vectors"] = L * factor * seconds / parallel

        def product(V: Tensor) -> Tensor:
            if plan.passes == 1:
                return J @ V
            return case.jacobians.sketch([(middle, row)] * R).operator.apply(V)

        layer = Layer(triplets, product, moments(J, triplets.S[:, 0]), [], [True] * len(J), lambda: J)
    bases = [layer.triplets] * L
    seconds, _ = _timed_again(lambda: pairs([layer], plan.ks, plan.extras, bases))
    stages["pairs"] = L * factor * seconds
    selections = [(middle, row)] * R
    timed = seconds_of_blocks(case.jacobians, recording, selections, layer, plan, _timed_again)
    return stages | {choice: factor * seconds for choice, seconds in timed.items()}


def _tokenwise(case: _Case) -> dict[str, float]:
    """Return the seconds of the couplings across tokens, from one block in its own basis."""
    settings, recording = case.settings, case.recording
    L, n = len(recording.calls), case.sample.length
    tokens, basis_layers = settings.pair_positions(range(n)), settings.basis_layers(L)
    if not basis_layers:
        return {}
    few, middle = tokens[: max(2, min(3, len(tokens)))], L // 2 + 1
    selected = [Selected(recording, 0, few)]
    seconds, _ = _timed_again(lambda: tokenwise_couplings(case.jacobians, selected, {middle: middle}, case.plan))
    steps = tokenwise_steps(len(tokens), basis_layers) / tokenwise_steps(len(few), {middle: middle})
    return {"tokenwise": case.samples * steps * seconds}


def _method(case: _Case) -> str:
    plan, dtype, device = case.plan, case.recording.calls[0].x.dtype, case.jacobians.replica.device
    if not plan.forms:
        chosen = "matrix-free: products with Jacobians that are not formed"
    else:
        iterates = basis_fits(plan.d, plan.K) and (
            plan.svd == "krylov" or (plan.svd != "full" and krylov_is_cheaper(plan.d, plan.K, dtype, device))
        )
        chosen = "krylov: iteration on Jacobians" if iterates else "full decomposition of Jacobians"
        if plan.passes == 2:
            chosen += ", in two passes over the blocks, as the Jacobians of one token do not fit the budget together"
    return f"{chosen} (svd={plan.svd!r})" if case.settings.forms_jacobians else "no Jacobians"


def _peak(case: _Case, calls: int) -> int:
    """Return the bytes beside the weights: recordings, Jacobians or bases, and the larger of products and decompositions."""
    settings, plan, rows = case.settings, case.plan, case.together
    recordings = min(settings.memory(4), case.recording.nbytes() * min(max(1, ceil(rows / len(case.rows))), calls))
    if not settings.forms_jacobians:
        return recordings
    column = plan.d * plan.itemsize
    bases = 4 * rows * plan.of_row * plan.K * column  # U and V of each block, and of all blocks together
    products = max(rows * plan.bytes_of_pairs, min(settings.memory(4), 16 * max(256, rows) * column))
    if not plan.forms:
        return recordings + bases + rows * 2 * basis_size(plan.d, plan.K) * column + products
    kept = plan.of_row if plan.kept == "device" else 1
    parallel = min(kept, torch.get_num_threads())
    return (
        recordings
        + bases
        + rows * kept * plan.bytes_of_jacobian
        + max(products, parallel * SVD_COPIES * plan.bytes_of_jacobian)
    )


def _timed_text(case: _Case | None, jacobians: Jacobians) -> str:
    device, dtype = jacobians.replica.device, str(jacobians.replica.dtype).removeprefix("torch.")
    if case is None or not case.settings.forms_jacobians:
        return f"one forward pass, on {device} in {dtype}"
    name = _middle(measured_calls(case.recording))[0].name
    rows = min(case.together, ROWS)
    return f"one forward pass, and {name} at {rows} token{'s' if rows > 1 else ''}, on {device} in {dtype}"


def _middle(calls: Sequence[BlockCall]) -> tuple[BlockCall, BlockCall]:
    """Return the block to time, and another one, if there is one."""
    at = (len(calls) - 1) // 2
    return calls[at], calls[max(0, at - 1)] if at else calls[-1]


def _deepened(recording: Recording, depth: int) -> Recording:
    """Return the recording of a model with `depth` blocks like these; the last stays the last."""
    return replace(recording, calls=[*islice(cycle(recording.calls), depth - 1), recording.calls[-1]])


def _length(batch: Batch) -> int:
    tensors = [v for v in (*batch.arguments, *batch.keywords.values()) if isinstance(v, Tensor)]
    return tensors[0].shape[1] if tensors and tensors[0].dim() > 1 else 1


def _size(batch: Batch) -> int:
    return len(batch.labels) * _length(batch)


def _timed(function: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def _timed_again(function: Callable[[], T]) -> tuple[float, T]:
    """Time a function; a brief one again, as libraries start up in the first call."""
    seconds, result = _timed(function)
    return _timed(function) if seconds < BRIEF else (seconds, result)


def _timed_after_warm_up(function: Callable[[BlockCall], T], call: BlockCall, other: BlockCall) -> tuple[float, T]:
    """Time a function of a block; if it is brief, of another block, which has not been checked either."""
    seconds, result = _timed(lambda: function(call))
    return _timed(lambda: function(other)) if seconds < BRIEF else (seconds, result)
