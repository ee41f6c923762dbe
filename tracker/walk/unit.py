"""Load and measure one checkpoint of a walk and label the unit with its provenance."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import integrity, scores
from checkpoints.integrity import load_copy, unchanged
from checkpoints.suites import Checkpoint
from tracker.common.errors import UsageError, panics_as_errors
from tracker.common.steps import UNTRAINED
from tracker.common.text import first_line
from tracker.measures.settings import Settings
from tracker.walk.plan import Measurement, SelectedCheckpoints, WalkPlan, untrained

if TYPE_CHECKING:
    import torch
    import xarray as xr


@panics_as_errors()
def measure_checkpoint(plan: WalkPlan, checkpoint: Checkpoint, directory: Path) -> "xr.Dataset":
    """Load and measure a fetched checkpoint; return its unit, labelled with the checkpoint's provenance.

    Raises:
        CheckpointError: if it can't be loaded or is not to be trusted, or if its files change meanwhile.
    """
    load = plan.measurement.load
    if checkpoint.revision is not None:  # of a cache
        return _measure_files(plan, checkpoint, directory, load)
    with unchanged(directory):
        return _measure_files(plan, checkpoint, directory, partial(load_copy, load))


def _measure_files(
    plan: WalkPlan, checkpoint: Checkpoint, directory: Path, load: Callable[[Path], tuple[Any, Any]]
) -> "xr.Dataset":
    """Load and measure a checkpoint whose files do not change."""
    from checkpoints.load import init_untrained

    selection, measurement, output = plan.selection, plan.measurement, plan.output
    model, tokenizer = load(directory)
    trained = checkpoint.seed is None
    if checkpoint.seed is not None:
        model = init_untrained(model, checkpoint.seed)
    with _fingerprint(model.state_dict().items(), measurement.device) as fingerprint:
        unit, resident = _measure(measurement, output.store.continued(measurement.settings), model, tokenizer)
    listing = selection.listings.get(checkpoint.name)
    unit = unit.assign_coords(
        step=checkpoint.step,
        revision=(checkpoint.revision or "") if trained else untrained(checkpoint.seed),
        commit=directory.name if checkpoint.revision and trained else "",
        files_sha256=integrity.files_digest(directory, listing) if trained else "",
        fingerprint=fingerprint.result(),
        suspect=selection.suspect.get(checkpoint.step, ""),
    )
    if checkpoint.stage:
        unit = unit.assign_coords(stage=checkpoint.stage)
    if checkpoint.tokens is not None:
        unit = unit.assign_coords(tokens_seen=checkpoint.tokens)
    unit = unit.assign_coords({name: ("prompt", labels) for name, labels in measurement.prompt_labels.items()})
    unit = with_scores(unit, output.scores.get(checkpoint.step, {}) | scores.read_from_checkpoint(directory))
    unit.attrs |= {"suite": selection.suite.name, "model_name": checkpoint.source}
    unit.attrs["settings_sha256"] = output.settings_sha256
    files = "in their files" if checkpoint.revision is not None else "in a copy of their files"
    in_files = directory.is_dir() and trained
    unit.attrs["weights_kept"] = "on the device" if resident else files if in_files else "in memory"
    return unit


@contextmanager
def _fingerprint(weights: "Iterable[tuple[str, torch.Tensor]]", device: "torch.device") -> Iterator[Future[str]]:
    """Hash a model's weights; on an accelerator, while the model is measured in this context.

    Raises:
        CheckpointError: if the weights are not finite, in place of what the measurement makes of them.
    """
    with ThreadPoolExecutor(1) as thread:
        hashed = thread.submit(integrity.fingerprint, weights)
        if device.type == "cpu":  # it would take the measurement's cores
            hashed.result()
        try:
            yield hashed
        except (FloatingPointError, RuntimeError, ValueError):
            hashed.result()
            raise
        hashed.result()


def _measure(
    measurement: Measurement, settings: Settings, model: "torch.nn.Module", tokenizer: Any
) -> "tuple[xr.Dataset, bool]":
    """Measure a loaded model; return its Dataset, and whether all weights were on the device.

    Raises:
        UsageError: if memory runs out.
    """
    from tracker.blocks.find import find_blocks
    from tracker.capture.weights import weights_memory
    from tracker.devices import is_allocation_failure
    from tracker.measurement import measure
    from tracker.walk.plan import default_budget, stays_on_device

    device = measurement.device
    blocks = find_blocks(model)
    weights = weights_memory(model, blocks, settings.torch_dtype)
    budget = measurement.memory_budget or default_budget(device, weights)
    resident = stays_on_device(device, weights, budget)
    try:
        if resident:  # otherwise the weights stay memory-mapped in their files and are loaded block by block
            model.to(device)
        unit = measure(
            model,
            measurement.inputs,
            tokenizer=tokenizer,
            device=device,
            blocks=blocks,
            max_tokens=measurement.max_tokens,
            progress=False,  # the walk shows its own
            **replace(settings, memory_budget=budget).as_options(),
        )
    except (RuntimeError, MemoryError) as error:
        if not is_allocation_failure(error):
            raise
        raise UsageError(
            f"memory runs out with a budget of {budget / 1e9:.3g} GB beside the weights ({first_line(error)}); give a "
            "smaller --memory_budget"
        ) from error
    return unit.assign_attrs(memory_budget=f"{budget / 1e9:.3g} GB"), resident


def with_scores(unit: "xr.Dataset", scored: Mapping[str, float]) -> "xr.Dataset":
    """Add scores to a unit and return it; an untrained model has no scores."""
    import xarray as xr

    if str(unit.coords["revision"].item()).startswith(UNTRAINED):
        return unit
    if "score" in unit:
        has = {str(task): float(value) for task, value in zip(unit["task"].values, unit["score"].values, strict=True)}
        scored = has | dict(scored)
        unit = unit.drop_dims("task")
    if scored:
        unit = unit.assign(score=xr.DataArray(list(scored.values()), {"task": list(scored)}, "task"))
    return unit


def changed(selection: SelectedCheckpoints, digests: Mapping[int, str]) -> list[int]:
    """Return the steps whose weights differ from those that the units were measured from.

    Args:
        digests: `files_sha256` of the units, by step.
    """
    measured = {c: digests[c.step] for c in selection.checkpoints if c.step in digests}
    return [c.step for c, digest in measured.items() if digest and selection.digest(c) not in ("", digest)]
