"""The expected cost of a measurement, which a dry run returns: arithmetic over shapes, and the rate of one matrix product.

    operations = B R (2 d P + D) + 2 B^2 R K d^2 + 2 PASSES N T

At each of R rows there are B Jacobians of width d. P is the number of weights of a block, D the operations of a decomposition, K
the number of singular vectors, N the number of weights of the model, and T that of tokens in all samples. The terms are the
Jacobians with their singular vectors, the pairs of blocks, and the passes of the model. What `measures=` adds is not counted.

    seconds = operations / rate + B G OVERHEAD, with G groups of rows that are measured together

Products of the Jacobians that are not made and the rate that the others lack nearly cancel: docs/cost.md has measured times.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

from tracker.common.errors import UsageError
from tracker.common.text import counted, duration, entry, size
from tracker.linalg.costs import decomposition
from tracker.measures.calls import record_call
from tracker.measures.layers import check_kept, kept_bytes
from tracker.measures.plan import Plan, make_plan
from tracker.measures.settings import Settings
from tracker.model.description import Blocks
from tracker.model.inputs import Batch
from tracker.model.replica import Replica
from tracker.model.weights import bytes_of, converted_block
from tracker.model.wrappers import unwrap

PASSES = 6  # forward, of the blocks: 5.7 to 8.7 were counted in three small models, recording and questions together
OVERHEAD = 0.1  # seconds of Python and launches, for each block at each group of rows
# Float32 operations in a second, and bytes of memory. Two cores of an AMD EPYC: measured (docs/cost.md). H200: measured
# (docs/gpu.md), and the H100 is the same processor; A100: the data sheet's.
DEVICES = {
    "2cores": ("cpu", 0.18e12, None),
    "a100": ("cuda", 19.5e12, 80_000_000_000),
    "h100": ("cuda", 51.2e12, 80_000_000_000),
    "h200": ("cuda", 51.2e12, 141_000_000_000),
}
SVD_COPIES = 4  # arrays of the size of a Jacobian that its decomposition takes
PRODUCT = 2048  # width of the matrices of the product that is timed


@dataclass(frozen=True)
class Machine:
    """What a measurement would run on.

    Attributes:
        name: for a person.
        device: its kind of device, which need not be there.
        rate: operations of a matrix product in a second.
        memory: bytes of the accelerator's memory; None: read from the device.
    """

    name: str
    device: torch.device
    rate: float
    memory: int | None = None


def named_machine(name: str) -> Machine:
    """Return a machine of the table.

    Raises:
        UsageError: for another name.
    """
    if name not in DEVICES:
        raise UsageError(f"--on {name}; choose from {', '.join(DEVICES)}")
    device, rate, memory = DEVICES[name]
    return Machine(name.upper(), torch.device(device), rate, memory)


def this_machine(device: torch.device, dtype: torch.dtype = torch.float32) -> Machine:
    """Return this machine, with the rate of one short product on the device; the first of two starts libraries."""
    a = torch.ones(PRODUCT, PRODUCT, device=device, dtype=dtype)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds = time.perf_counter() - started
    return Machine(f"this machine ({device})", device, 2 * PRODUCT**3 / seconds)


@dataclass(frozen=True)
class Case:
    """What the cost of a measurement follows from.

    Attributes:
        model: the model, perhaps without weights.
        blocks: its blocks.
        lengths: the number of tokens of each sample.
        rows: the number of tokens whose Jacobians are measured, over all samples.
        width: the width of the hidden state.
        depth: the number of blocks.
        normed: whether the last block is measured with the final norm as well.
    """

    model: nn.Module
    blocks: Blocks
    lengths: Sequence[int]
    rows: int
    width: int
    depth: int
    normed: bool


@dataclass(frozen=True)
class Cost:
    """What a measurement is expected to take; print it to read it.

    Attributes:
        blocks: the blocks, final norm, unembedding and class token that were found.
        samples: number of prompts or images.
        tokens: length of the shortest and of the longest that the model runs on.
        rows: number of tokens whose Jacobians are measured, over all samples.
        k: the numbers of singular vectors.
        width: the width d of the hidden state.
        operations: of the coupling; none without it but those of the model's passes.
        seconds: of the coupling on `machine`.
        machine: what it would run on.
        weights_bytes: bytes of the model's weights.
        peak_bytes: bytes beside the weights at the peak.
        memory_budget: the limit on `peak_bytes` that was asked for.
        warning: what is beyond the budget, or "".
    """

    blocks: str
    samples: int
    tokens: tuple[int, int]
    rows: int
    k: tuple[int, ...]
    width: int
    operations: float
    seconds: float
    machine: Machine
    weights_bytes: int
    peak_bytes: int
    memory_budget: int
    warning: str

    def __str__(self) -> str:
        shortest, longest = self.tokens
        length = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
        rate = f"{self.machine.rate / 1e12:.2g} TFLOP/s"
        operations = (
            f"{self.operations:.2g} operations; {self.machine.name} makes products at {rate}, and Python takes {OVERHEAD} s "
            "for each block"
        )
        lines = [
            ("blocks", self.blocks),
            (
                "inputs",
                f"{self.samples} of {length}; Jacobians at {counted(self.rows, 'token')} in all",
            ),
            ("K", f"{', '.join(map(str, self.k))} of width {self.width}"),
            ("time", f"about {duration(self.seconds)} for the coupling: {operations}"),
            (
                "memory",
                f"about {size(self.peak_bytes)} beside the weights ({size(self.weights_bytes)}); "
                f"memory_budget {size(self.memory_budget)}",
            ),
            ("warning", self.warning),
        ]
        shown = [entry(label, text) for label, text in lines if text]
        return "\n".join(["dry run: nothing was measured", *shown])

    __repr__ = __str__


def cost_of_calls(
    replica: Replica, calls: Sequence[Batch], settings: Settings, machine: Machine
) -> Cost:
    """Return the cost of measuring forward calls, inside the context of `prepare`, from one recorded call.

    Raises:
        UsageError: as measuring them would.
    """
    # The call of the median size stands for the others.
    batch = sorted(calls, key=_length)[len(calls) // 2]
    recording, rows, samples = record_call(replica, batch, settings, settings.memory(4))
    share = samples[0].length / _length(batch)  # tokens of the blocks for one of the inputs
    lengths = [round(share * _length(call)) for call in calls for _ in call.labels]
    rows_of_all = round(len(rows) * len(lengths) / len(samples))
    if settings.tokens == "all":
        rows_of_all = round(len(rows) * sum(lengths) / (len(samples) * samples[0].length))
    case = Case(
        replica.model,
        replica.description,
        lengths,
        rows_of_all,
        recording.calls[0].x.shape[-1],
        len(recording.calls),
        recording.normed_last is not None,
    )
    return cost_of(case, settings, machine)


def cost_of(case: Case, settings: Settings, machine: Machine) -> Cost:
    """Return the cost of a measurement.

    Raises:
        UsageError: if what is to be kept exceeds the machine's memory, or a K the width.
    """
    plan = make_plan(settings, case.width, case.depth, case.normed, machine.device)
    check_kept(settings, case.width, case.depth, case.rows)
    operations = _operations(case, settings, plan)
    groups = ceil(case.rows / plan.rows) if settings.forms_jacobians else 0
    overhead = OVERHEAD * plan.of_row * groups
    warning, one = "", plan.bytes_of_jacobian
    if settings.forms_jacobians and plan.kept == "file":
        warning = (
            "the Jacobians of one token exceed half of the budget together: they wait in a file"
        )
    if settings.forms_jacobians and one > settings.memory_budget // 2:
        warning = (
            f"one Jacobian takes {size(one)}, more than half of the memory budget, which is what Jacobians may take: "
            "the budget is exceeded; raise it"
        )
    return Cost(
        blocks=str(case.blocks),
        samples=len(case.lengths),
        tokens=(min(case.lengths), max(case.lengths)),
        rows=case.rows,
        k=plan.ks,
        width=plan.d,
        operations=operations,
        seconds=operations / machine.rate + overhead,
        machine=machine,
        weights_bytes=bytes_of(case.model, settings.torch_dtype)[0],
        peak_bytes=_peak(case, settings, plan),
        memory_budget=settings.memory_budget,
        warning=warning,
    )


def _operations(case: Case, settings: Settings, plan: Plan) -> float:
    """Return the operations of the passes and, if it is measured, of the coupling, as the module states them."""
    d, K, B, R = plan.d, plan.K, plan.of_row, case.rows
    weights = sum(p.numel() for p in case.model.parameters())
    passes = 2.0 * PASSES * weights * sum(case.lengths)
    if not settings.includes("coupling"):
        return passes
    of_jacobian = 2 * d * _weights_of_block(case, weights)
    of_decomposition = decomposition(d, K, settings.torch_dtype)
    return passes + B * R * (of_jacobian + of_decomposition) + 2 * B**2 * R * K * d**2


def _weights_of_block(case: Case, weights: int) -> int:
    """Return the number of weights of the largest block; of blocks that are no modules, an equal share of all."""
    if case.blocks.spans:
        return weights // case.depth
    blocks = [unwrap(case.model).get_submodule(name) for name in case.blocks.names]
    return max(sum(p.numel() for p in block.parameters()) for block in blocks)


def _peak(case: Case, settings: Settings, plan: Plan) -> int:
    """Return the bytes beside the weights.

    These are a converted block, what is kept, the recorded states, bases, Jacobians, and products or decompositions.
    """
    rows = min(plan.rows, max(1, case.rows))
    column = plan.d * plan.itemsize
    states = (case.depth + 1) * sum(case.lengths) * column
    peak = (
        converted_block(case.model, case.blocks, settings.torch_dtype)
        + kept_bytes(settings, case.width, case.depth, case.rows)
        + min(settings.memory(4), states)
    )
    if not settings.forms_jacobians:
        return peak
    # U and V of each block, and of all blocks together
    bases = 4 * rows * plan.of_row * plan.K * column
    products = max(
        rows * plan.bytes_of_pairs, min(settings.memory(4), 16 * max(256, rows) * column)
    )
    kept = plan.blocks_together(rows)
    parallel = min(kept, torch.get_num_threads())
    decompositions = parallel * SVD_COPIES * plan.bytes_of_jacobian
    # Products come after the decompositions, whose memory is free by then.
    return peak + bases + rows * kept * plan.bytes_of_jacobian + max(products, decompositions)


def _length(batch: Batch) -> int:
    tensors = [v for v in (*batch.arguments, *batch.keywords.values()) if isinstance(v, Tensor)]
    return tensors[0].shape[1] if tensors and tensors[0].dim() > 1 else 1
