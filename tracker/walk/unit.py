"""One checkpoint of a walk as a unit of its results: loaded, measured, and labelled with what it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import integrity, scores
from checkpoints.suites import UNTRAINED, Checkpoint
from tracker.walk.plan import Plan, untrained

if TYPE_CHECKING:
    import torch
    import xarray as xr


def measure_checkpoint(plan: Plan, checkpoint: Checkpoint, directory: Path) -> "xr.Dataset":
    """Load and measure a fetched checkpoint; the unit says which it was."""
    from checkpoints.load import init_untrained
    from tracker.measurement import measure

    model, tokenizer = plan.load(directory)
    trained = checkpoint.seed is None
    if checkpoint.seed is not None:
        model = init_untrained(model, checkpoint.seed)
    fingerprint = integrity.fingerprint(model.state_dict().items())
    resident = plan.device.type != "cpu" and _weights(model) <= plan.measure["memory_budget"] // 2
    if resident:  # else they stay in their files' pages, and pass through memory block by block
        model.to(plan.device)
    unit = measure(model, plan.inputs, tokenizer=tokenizer, device=plan.device, **plan.measure)
    listing = plan.listings.get(checkpoint.name)
    unit = unit.assign_coords(
        step=checkpoint.step,
        revision=(checkpoint.revision or "") if trained else untrained(checkpoint.seed),
        commit=directory.name if checkpoint.revision and trained else "",
        files_sha256=integrity.files_digest(directory, listing) if trained else "",
        fingerprint=fingerprint,
        suspect=plan.suspect.get(checkpoint.step, ""),
    )
    if checkpoint.stage:
        unit = unit.assign_coords(stage=checkpoint.stage)
    if checkpoint.tokens is not None:
        unit = unit.assign_coords(tokens_seen=checkpoint.tokens)
    unit = unit.assign_coords({name: ("prompt", labels) for name, labels in plan.of_prompts.items()})
    unit = with_scores(unit, plan.scores.get(checkpoint.step, {}) | scores.read_from_checkpoint(directory))
    unit.attrs |= {"suite": plan.suite.name, "model_name": checkpoint.source, "settings_sha256": plan.settings}
    elsewhere = "in their files" if directory.is_dir() and trained else "in memory"
    unit.attrs["weights_kept"] = "on the device" if resident else elsewhere
    return unit


def with_scores(unit: "xr.Dataset", scored: Mapping[str, float]) -> "xr.Dataset":
    """A unit with these scores beside those it has; scores are never those of an untrained model."""
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


def changed(plan: Plan, units: Mapping[int, "xr.Dataset"]) -> list[int]:
    """The steps whose weights are not those that the store's units, or their summaries here, were measured from."""
    measured = {
        c: units[c.step].coords["files_sha256"].item()
        for c in plan.checkpoints
        if "files_sha256" in _coords(units, c.step)
    }
    return [c.step for c, digest in measured.items() if plan.digest(c) not in ("", digest)]


def _weights(model: "torch.nn.Module") -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def _coords(units: Mapping[int, "xr.Dataset"], step: int) -> Any:
    return units[step].coords if step in units else ()
