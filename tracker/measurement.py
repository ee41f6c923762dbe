"""Measure one model on one set of inputs and return one labelled Dataset.

Each forward call is recorded once (`recording`). The trajectory measures are computed from its states, the couplings from
the token rows of one or several calls (`depthwise`), and the samples are joined into one Dataset (`dataset`). Memory: a
quarter of the memory budget for the recordings of the calls whose rows are measured together (the rest is in files), and
half of it for their couplings.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any, Literal, Unpack, overload

import torch
import xarray as xr
from torch import Tensor, nn

from tracker.blocks.find import check_model
from tracker.blocks.prepare import prepare
from tracker.blocks.reachability import check_reachability
from tracker.blocks.tokens import LAST_WORD
from tracker.common.progress import Progress, progress_bar
from tracker.devices import is_allocation_failure, raise_device_errors, release_memory
from tracker.jacobians.checks import require_derivative
from tracker.jacobians.independent import settle_full_sequence
from tracker.jacobians.restriction import FAILURES
from tracker.linalg.jacobian import keeping_at_most
from tracker.measures.calls import measure_calls, record_call
from tracker.measures.cost import Cost, cost_of_calls, this_machine
from tracker.measures.dataset import Sample, assemble, labelled
from tracker.measures.layers import with_kept
from tracker.measures.options import accepts_options, settings_from
from tracker.measures.settings import LEAST_MEMORY_BUDGET, Options, Settings
from tracker.model.description import Blocks, Named
from tracker.model.inputs import Batch, batches
from tracker.model.proposals import TRIED, BlocksNotFound, reason
from tracker.model.replica import Replica
from tracker.model.wrappers import unwrap
from tracker.provenance import describe, digest, has_float64, usable_device

ATTEMPTS = 3  # with the whole memory budget, half of it and a quarter


class Given(Options, total=False):
    """The keywords of `measure`, for static type checkers."""

    tokenizer: Callable[..., Mapping[str, Tensor]] | None
    device: torch.device | str | None
    blocks: Named | Blocks | None
    max_tokens: int | None
    progress: bool | None
    keep: str | Sequence[str]


@overload
def measure(
    model: nn.Module, inputs: Any, *, dry_run: Literal[False] = False, **options: Unpack[Given]
) -> xr.Dataset: ...


@overload
def measure(
    model: nn.Module, inputs: Any, *, dry_run: Literal[True], **options: Unpack[Given]
) -> Cost: ...


@accepts_options
def measure(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Callable[..., Mapping[str, Tensor]] | None = None,
    device: torch.device | str | None = None,
    blocks: Named | Blocks | None = None,
    max_tokens: int | None = None,
    progress: bool | None = None,
    keep: str | Sequence[str] = (),
    dry_run: bool = False,
    **options: Unpack[Options],
) -> xr.Dataset | Cost:
    """Measure transformer block coupling and token trajectories of one model (Aubry et al., ICLR 2025).

    The model is only read: its parameters, dtypes, modes, gradients and hooks and the random state stay as they were, also
    when measuring raises. Dropout and stochastic depth are off; every weight is converted to `dtype`.

    Args:
        model: a Hugging Face, timm, torchvision or plain PyTorch transformer.
        inputs: prompts (with `tokenizer`), or a tensor or mapping for the model's forward, batch first.
        tokenizer: the tokenizer of the prompts; of ids it states the special tokens.
        device: device of the computation. Default: that of the model's weights; the CPU if all weights are offloaded, or if
            their device has no float64, as MPS.
        blocks: an argument or a result of `find_blocks`, to name the blocks or correct an assumption.
        max_tokens: cut longer prompts to this many tokens, with a notice, instead of refusing those that do not fit.
        progress: whether to show a progress bar after three seconds. Default: on a terminal and in a notebook.
        keep: "jacobian" or "singular_vectors", or both: also return J, and U and V, of every block at every chosen token. J
            takes d² numbers for each; they are kept in the machine's memory.
        dry_run: return the expected operations, seconds and bytes, from one recorded call, instead of measuring.
        **options: measurement options.

    Returns:
        A Dataset over prompt, token (the chosen rows), position (all rows), k, layer 1..L, layer_other, depth 0..L.
        In the matrix of layer pairs, `layer` is the block of the Jacobian and `layer_other` the block of the basis.
        Positions that a shorter prompt lacks and undefined values are NaN; `diagnostics_undefined` counts the latter.
        Norm-like values are in the units of the hidden state; couplings and scores have no unit. Attributes state the
        provenance.
        With `dry_run`, a `Cost`: print it.

    Raises:
        UsageError: for inputs, options or models that can't be measured; the message says what to do.
        TypeError: for an unknown option.
        FloatingPointError: if a block overflows or returns NaN; the message names it.
    """
    settings = with_kept(settings_from(options, "measure", signature(measure).parameters), keep)
    if not dry_run:
        return measure_with(
            settings, model, inputs, tokenizer, device, blocks, max_tokens, progress
        )
    check_model(model)
    calls = batches(model, inputs, tokenizer, max_tokens)
    with prepared(model, blocks, calls, settings, _device(model, device)) as replica:
        return cost_of_calls(
            replica, calls, settings, this_machine(replica.device, settings.torch_dtype)
        )


def measure_with(
    settings: Settings,
    model: nn.Module,
    inputs: Any,
    tokenizer: Callable[..., Mapping[str, Tensor]] | None,
    device: torch.device | str | None,
    blocks: Named | Blocks | None,
    max_tokens: int | None,
    progress: bool | None,
) -> xr.Dataset:
    """Measure as `measure` does, with settings that may be those of a later measurement."""
    started = time.perf_counter()
    check_model(model)
    device = _device(model, device)
    calls = batches(model, inputs, tokenizer, max_tokens)
    with (
        prepared(model, blocks, calls, settings, device) as replica,
        progress_bar(progress) as shown,
    ):
        samples = measure_calls(replica, calls, settings, shown)
    return to_dataset(samples, model, replica.description, settings, device, inputs, started)


def measure_samples(
    model: nn.Module,
    blocks: Blocks,
    calls: Sequence[Batch],
    settings: Settings,
    device: torch.device,
) -> list[Sample]:
    """Measure each sample of some forward calls; other processes may measure other calls of the same inputs.

    Of a model whose weights are sharded over ranks, every rank measures the same calls, and all ranks raise if one does.
    """
    with prepared(model, blocks, calls, settings, device) as replica:
        return measure_calls(replica, calls, settings, Progress())


def measure_with_less_memory(
    model: nn.Module,
    blocks: Blocks,
    calls: Sequence[Batch],
    settings: Settings,
    device: torch.device,
) -> list[Sample]:
    """Measure samples as `measure_samples`; if memory runs out, again with half the memory budget, and a quarter."""
    message = ""
    for attempt in range(ATTEMPTS):
        smaller = replace(
            settings, memory_budget=max(LEAST_MEMORY_BUDGET, settings.memory_budget >> attempt)
        )
        try:
            return measure_samples(model, blocks, calls, smaller, device)
        except (RuntimeError, MemoryError) as error:
            if not is_allocation_failure(error):
                raise
            message = str(error)
        # Outside of `except`: the error holds the frames, and they the tensors.
        release_memory(device)
    raise torch.OutOfMemoryError(message)


@contextmanager
def prepared(
    model: nn.Module,
    blocks: Named | Blocks | None,
    calls: Sequence[Batch],
    settings: Settings,
    device: torch.device,
) -> Iterator[Replica]:
    """Yield a replica of the model, whose description states the blocks that were found.

    Raises:
        UsageError: if blocks are not found, then or later; it says which of those that the error proposes can be measured.
    """
    try:
        with prepare(
            model, blocks, calls, device, settings.torch_dtype, settings.tokens
        ) as replica:
            yield replica
    except BlocksNotFound as error:
        raise _tried(error, model, calls[0], settings, device) from error.__cause__


def _tried(
    error: BlocksNotFound, model: nn.Module, batch: Batch, settings: Settings, device: torch.device
) -> BlocksNotFound:
    """Return the error after trying every proposal, and those of their errors instead of them."""
    lines = {proposal.argument: proposal for proposal in error.proposals}
    pending, work, failed = list(lines), [], ""
    # It grows: the error of a proposal may propose what comes closer.
    for line in pending:
        proposal = lines[line]
        failure = _why_not_measurable(model, proposal.blocks, batch, settings, device)
        proposed = failure.proposals if isinstance(failure, BlocksNotFound) else ()
        closer = [other for other in proposed if other.argument not in lines]
        lines |= {other.argument: other for other in closer}
        pending += [other.argument for other in closer]
        if failure is None:
            work.append(proposal)
        elif not closer:
            failed += proposal.failed(reason(failure))
    finding = (
        f"{error.finding}\nTried on these inputs, and not measurable:{failed}"
        if failed
        else error.finding
    )
    return BlocksNotFound(finding, work, error.remedy, TRIED)


def _why_not_measurable(
    model: nn.Module, blocks: Named | Blocks, batch: Batch, settings: Settings, device: torch.device
) -> Exception | None:
    """Return why these blocks can't be measured on a forward call, or None: record it, and linearize every block once."""
    # Whether Jacobians can be formed does not depend on the other measures, which take time.
    settings = replace(settings, measures=("coupling",))
    try:
        with prepare(
            model, blocks, [batch], device, settings.torch_dtype, settings.tokens
        ) as replica:
            recording, rows, _ = record_call(replica, batch, settings, settings.memory(4))
            check_reachability(replica, batch, class_token_by_default=settings.tokens is None)
            for call in recording.calls:
                call = call.on_device()
                # What can't be cut is linearized over its whole sequences: products take several times what is kept for them.
                limited = keeping_at_most(settings.memory_budget // 4)
                with replica.materialize(call.block), replica.materialize(call.final_norm), limited:
                    require_derivative(call, rows, replica.dtype)
                    if settings.derivative != "autograd":
                        _, group = next(rows.disjoint_groups())
                        settle_full_sequence(call, group)
    except FAILURES as error:  # of the model's code, too
        raise_device_errors(error)
        return error
    return None


def to_dataset(
    samples: Sequence[Sample],
    model: nn.Module,
    blocks: Blocks,
    settings: Settings,
    device: torch.device,
    inputs: Any,
    started: float,
) -> xr.Dataset:
    """Join samples into one Dataset, with the provenance of a measurement started at `started` (`time.perf_counter`)."""
    dataset = assemble(samples)
    without_special = [sample for sample in samples if sample.attributes["tokens"] == LAST_WORD]
    dataset.attrs |= describe(unwrap(model), device)
    dataset.attrs |= {
        "blocks_found_by": blocks.found_by,
        "fixed": ", ".join(map(str, blocks.fixed)) or "none",
        # Some prompts may have been cut before [SEP]
        "tokens": (without_special or samples)[0].attributes["tokens"],
        "measures": ", ".join(settings.measures),
        "svd": settings.svd,
        "precision": settings.precision,
        "derivative": settings.derivative,
        "inputs_sha256": digest(inputs),
    }
    # Of one prompt, tokenizers make different ids.
    if ids := [torch.from_numpy(sample.ids) for sample in samples if sample.ids is not None]:
        dataset.attrs["token_ids_sha256"] = digest(ids)
    dataset.attrs["seconds"] = time.perf_counter() - started
    return labelled(dataset)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is None:
        devices = (parameter.device for parameter in model.parameters())
        # Meta: offloaded
        device = next((device for device in devices if device.type != "meta"), torch.device("cpu"))
        device = device if has_float64(device) else torch.device("cpu")
    return usable_device(device, f"device={str(device)!r}")
