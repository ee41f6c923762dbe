"""The expected cost of a measurement, as a dry run returns it: the plan times the seconds of one timed block.

    seconds = recorded calls * one call, with what is read off its states
        + L * rows / R * seconds of a block at R rows

The estimate leaves out what does not grow with the model (imports, the assembly of the Dataset), and measures that no block has
by itself (`NOT_TIMED`). It counts the checks of a block's derivative, which are made once, with every R rows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor

from tracker.common.errors import UsageError
from tracker.common.progress import Progress
from tracker.common.text import counted, duration, entry, join_names, size
from tracker.jacobians.halves import HalfJacobians
from tracker.jacobians.rows import Jacobians
from tracker.jacobians.slicing import Rows
from tracker.linalg.costs import krylov_is_cheaper
from tracker.linalg.krylov import basis_fits
from tracker.measures.calls import jacobians_of, record_call
from tracker.measures.depthwise import measure_blocks, pairs
from tracker.measures.layers import check_kept, kept_bytes, layers_of
from tracker.measures.plan import Plan, make_plan, measured_calls
from tracker.measures.settings import Settings
from tracker.model.inputs import Batch
from tracker.model.recording import BlockCall, Recording
from tracker.model.replica import Replica
from tracker.model.weights import bytes_of, converted_block


@dataclass(frozen=True)
class Cost:
    """What a measurement is expected to take; print it to read it.

    Attributes:
        blocks: the blocks, final norm, unembedding and class token that were found.
        samples: number of prompts or images.
        tokens: length of the shortest and of the longest that the model runs on.
        weights_bytes: bytes of the model's weights.
        memory_budget: the limit on `peak_bytes` that was asked for.
        refused: why the measurement would stop with an error; "" if nothing was found that stops it.
        rows: number of tokens whose Jacobians are measured, over all samples.
        k: the numbers of singular vectors.
        width: the width d of the hidden state.
        method: how singular vectors are found.
        seconds: of the measurement without the measures `not_timed`.
        not_timed: measures that were asked for and that `seconds` leaves out.
        peak_bytes: bytes beside the weights at the peak.
        warning: what is beyond the budget, or "".

    What comes after `refused` is empty where the measurement would stop at its first forward call.
    """

    blocks: str
    samples: int
    tokens: tuple[int, int]
    weights_bytes: int
    memory_budget: int
    refused: str = ""
    rows: int = 0
    k: tuple[int, ...] = ()
    width: int = 0
    method: str = ""
    seconds: float = 0.0
    not_timed: tuple[str, ...] = ()
    peak_bytes: int = 0
    warning: str = ""

    def __str__(self) -> str:
        shortest, longest = self.tokens
        length = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
        without = f", without {join_names(self.not_timed)}" if self.not_timed else ""
        tokens = counted(self.rows, "token")
        memory = f"about {size(self.peak_bytes)} beside the weights ({size(self.weights_bytes)}); "
        lines = [
            ("refused", self.refused),
            ("blocks", self.blocks),
            ("inputs", f"{self.samples} of {length}; Jacobians at {tokens} in all"),
            ("K", f"{', '.join(map(str, self.k))} of width {self.width}" if self.k else ""),
            ("method", self.method),
            ("time", "" if self.refused else f"about {duration(self.seconds)}{without}"),
            ("memory", f"{memory}memory_budget {size(self.memory_budget)}" if self.k else ""),
            ("warning", self.warning),
        ]
        shown = [entry(label, text) for label, text in lines if text]
        return "\n".join(["dry run: nothing was measured", *shown])

    __repr__ = __str__


ROWS = 4  # token rows at most that are timed together
BRIEF = 2.0  # seconds below which a timing is repeated, as libraries start up in the first
NOT_TIMED = ("products", "tokenwise")
SVD_COPIES = 4  # arrays of the size of a Jacobian that its decomposition takes

T = TypeVar("T")


def estimate(
    replica: Replica, calls: Sequence[Batch], settings: Settings, depth: int | None = None
) -> Cost:
    """Estimate the cost of measuring forward calls, inside the context of `prepare`.

    Args:
        depth: the number of blocks of the measured model, if this one has fewer, all alike.
    """
    samples = sum(len(call.labels) for call in calls)
    sizes = [_size(batch) for batch in calls]
    # The call of the median size stands for the others.
    batch = calls[sorted(range(len(calls)), key=sizes.__getitem__)[len(calls) // 2]]
    # Of the inputs; images have as many tokens as the recording shows.
    lengths = [_length(batch) for batch in calls]
    of_plan: dict[str, Any] = {}
    refused = ""
    # Neither a window nor pairs of blocks need fit into fewer blocks.
    of_call = settings if depth is None else replace(settings, window=None, pair_layers=0)
    jacobians = jacobians_of(replica, settings, Progress())
    try:
        seconds, (recording, rows, measured) = _timed_again(
            lambda: record_call(replica, batch, of_call, settings.memory(4))
        )
        seconds *= sum(sizes) / _size(batch)
        lengths = [round(measured[0].length * length / _length(batch)) for length in lengths]
        if depth is not None:
            seconds *= depth / len(recording.calls)
            recording = _deepened(recording, depth)
        # All tokens grow with the length, the last ones with the number of samples.
        share = sum(sizes) / _size(batch)
        if settings.tokens != "all":
            share = samples / len(batch.labels)
        plan = make_plan(settings, recording)
        case = _Case(jacobians, recording, rows, settings, plan, round(len(rows) * share))
        of_plan = _of_plan(case, len(calls))
        check_kept(settings, recording, case.total)
        if settings.includes("coupling"):
            seconds += _seconds_of_blocks(case)
        of_plan |= {
            "seconds": seconds,
            "not_timed": tuple(name for name in NOT_TIMED if settings.includes(name)),
        }
    except (UsageError, FloatingPointError) as error:
        refused = str(error)
    return Cost(
        blocks=str(replica.description),
        samples=samples,
        tokens=(min(lengths), max(lengths)),
        weights_bytes=bytes_of(replica.model, settings.torch_dtype)[0],
        memory_budget=settings.memory_budget,
        refused=refused,
        **of_plan,
    )


@dataclass(frozen=True)
class _Case:
    """What is measured, resolved on one recorded call."""

    jacobians: Jacobians
    recording: Recording  # with the model's number of blocks
    rows: Rows
    settings: Settings
    plan: Plan
    total: int  # rows of all samples

    @property
    def together(self) -> int:
        """The number of rows that are measured together."""
        return min(self.plan.rows, max(1, self.total))


def _of_plan(case: _Case, calls: int) -> dict[str, Any]:
    """Return what the plan says of a measurement before a block is timed, as fields of `Cost`."""
    settings, plan, replica = case.settings, case.plan, case.jacobians.replica
    warning, one = "", plan.bytes_of_jacobian
    if settings.forms_jacobians and one > settings.memory_budget // 2:
        warning = (
            f"one Jacobian takes {size(one)}, more than half of the memory budget, which is what Jacobians may take: "
            "the budget is exceeded; raise it"
        )
    return {
        "rows": case.total,
        "k": plan.ks,
        "width": plan.d,
        "method": _method(case),
        "peak_bytes": _peak(case, calls)
        + converted_block(replica.model, replica.description, settings.torch_dtype)
        + kept_bytes(settings, case.recording, case.total),
        "warning": warning,
    }


def _seconds_of_blocks(case: _Case) -> float:
    """Return the seconds of all blocks at all rows, from one block at up to `ROWS` of them.

    On a CPU, small Jacobians are decomposed one on each core, so a brief block is timed again among as many.
    """
    jacobians, plan = case.jacobians, case.plan
    timed = min(case.together, ROWS)
    rows = case.rows.subset(slice(0, timed))
    repeats = max(1, timed // len(rows))
    choices = [choice for choice in plan.measures if choice not in NOT_TIMED]
    halves = HalfJacobians(jacobians)

    def measure(calls: Sequence[BlockCall]) -> None:
        blocks = [[(call, rows)] * repeats for call in calls]
        layers = layers_of(jacobians, blocks, plan)
        pairs(layers, plan.ks, plan.measures, [layers[0].triplets] * plan.of_row)
        measure_blocks(layers, blocks, choices, halves, min(plan.ks))

    # The first and the last block may be unlike the others.
    first, *others = _from_the_middle(case.recording)
    calls = [first]
    seconds = _timed(lambda: measure(calls))[0]
    if seconds < BRIEF:
        on_cores = plan.kept == "device" and jacobians.replica.device.type == "cpu"
        calls = others[: torch.get_num_threads() if on_cores else 1] or calls
        seconds = _timed(lambda: measure(calls))[0]
    # Not rounded up: a group that is not full takes less time.
    groups = case.total / (repeats * len(rows))
    return plan.of_row * groups * seconds / len(calls)


def _method(case: _Case) -> str:
    plan, dtype, device = case.plan, case.recording.calls[0].x.dtype, case.jacobians.replica.device
    iterates = plan.svd == "krylov" or (
        plan.svd == "auto" and krylov_is_cheaper(plan.d, plan.K, dtype, device)
    )
    iterates = iterates and basis_fits(plan.d, plan.K)
    chosen = "krylov: iteration on Jacobians" if iterates else "full decomposition of Jacobians"
    if plan.kept == "file":
        chosen += ", which wait in a file, as those of one token do not fit the budget together"
    return f"{chosen} (svd={plan.svd!r})" if case.settings.forms_jacobians else "no Jacobians"


def _peak(case: _Case, calls: int) -> int:
    """Return the bytes beside the weights: recordings, bases, Jacobians, and the larger of products and decompositions."""
    settings, plan, rows = case.settings, case.plan, case.together
    # As many calls as are recorded before their rows are enough, and no more than the budget holds: the others go to files.
    together = min(max(1, ceil(rows / len(case.rows))), calls)
    recordings = min(settings.memory(4), case.recording.nbytes() * together)
    if not settings.forms_jacobians:
        return recordings
    column = plan.d * plan.itemsize
    # U and V of each block, and of all blocks together
    bases = 4 * rows * plan.of_row * plan.K * column
    products = max(
        rows * plan.bytes_of_pairs, min(settings.memory(4), 16 * max(256, rows) * column)
    )
    kept = plan.blocks_together(rows)
    parallel = min(kept, torch.get_num_threads())
    jacobians = rows * kept * plan.bytes_of_jacobian
    decompositions = parallel * SVD_COPIES * plan.bytes_of_jacobian
    # Products come after the decompositions, whose memory is free by then.
    return recordings + bases + jacobians + max(products, decompositions)


def _from_the_middle(recording: Recording) -> list[BlockCall]:
    """Return the measured calls, those from the middle on before the others."""
    calls = measured_calls(recording)
    return [*calls[(len(calls) - 1) // 2 :], *calls[: (len(calls) - 1) // 2]]


def _deepened(recording: Recording, depth: int) -> Recording:
    """Return the recording of a model with `depth` blocks like these; the last stays the last."""
    return replace(
        recording, calls=[*islice(cycle(recording.calls), depth - 1), recording.calls[-1]]
    )


def _length(batch: Batch) -> int:
    tensors = [v for v in (*batch.arguments, *batch.keywords.values()) if isinstance(v, Tensor)]
    return tensors[0].shape[1] if tensors and tensors[0].dim() > 1 else 1


def _size(batch: Batch) -> int:
    return len(batch.labels) * _length(batch)


def _timed(function: Callable[[], T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = function()
    # Kernels run after the calls that launch them have returned.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def _timed_again(function: Callable[[], T]) -> tuple[float, T]:
    """Time a function; a brief one again, as libraries start up in the first call."""
    seconds, result = _timed(function)
    return _timed(function) if seconds < BRIEF else (seconds, result)
