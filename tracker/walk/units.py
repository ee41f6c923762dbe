"""The units of a walk: one measured checkpoint each, labelled with its provenance, in the store that the walk adds to.

`measure_checkpoint` makes a unit. `Units` keeps what the walk must know of each unit.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import xarray as xr

from checkpoints import integrity, scores
from checkpoints.copies import load_copy
from checkpoints.suites import Checkpoint
from tracker.common.errors import CheckpointError, UsageError, panics_as_errors
from tracker.common.text import UNTRAINED, first_line, size
from tracker.loggers.protocol import Row
from tracker.measures.dataset import unlabelled
from tracker.measures.settings import Settings
from tracker.netcdf import DamagedFile, file_content
from tracker.store import Store, by_step, likeness, require_one_curve
from tracker.walk.plan import (
    Measurement,
    SelectedCheckpoints,
    WalkPlan,
    default_budget,
    stays_on_device,
)

if TYPE_CHECKING:
    import torch


@panics_as_errors()
def measure_checkpoint(plan: WalkPlan, checkpoint: Checkpoint, directory: Path) -> xr.Dataset:
    """Load and measure a fetched checkpoint; return its unit, labelled with the checkpoint's provenance.

    Raises:
        CheckpointError: if it can't be loaded or is not to be trusted.
    """
    from checkpoints.load import init_untrained

    selection, measurement, output = plan.selection, plan.measurement, plan.output
    # It may be deleted while it is measured.
    own_scores = scores.read_from_checkpoint(directory)
    if checkpoint.revision is None:
        (model, tokenizer), digest = load_copy(measurement.load, directory, measurement.own_code)
    else:  # of a cache, whose files nobody rewrites
        model, tokenizer = measurement.load(directory)
        digest = integrity.files_digest(directory, selection.listings.get(checkpoint.name))
    # The weights of an untrained model are drawn in the place of those that were loaded, which say nothing of it.
    trained = checkpoint.seed is None
    if checkpoint.seed is not None:
        model = init_untrained(model, checkpoint.seed)
    with _fingerprint(model, measurement.device) as fingerprint:
        unit, resident = _measure(
            measurement, output.store.continued(measurement.settings), model, tokenizer
        )
    unit = unit.assign_coords(
        step=checkpoint.step,
        revision=(checkpoint.revision or "") if trained else f"{UNTRAINED}{checkpoint.seed}",
        commit=directory.name if checkpoint.revision and trained else "",
        files_sha256=digest if trained else "",
        fingerprint=fingerprint.result(),
        suspect=selection.suspect.get(checkpoint.step, ""),
    )
    if checkpoint.stage:
        unit = unit.assign_coords(stage=checkpoint.stage)
    if checkpoint.tokens is not None:
        unit = unit.assign_coords(tokens_seen=checkpoint.tokens)
    unit = unit.assign_coords(
        {name: ("prompt", labels) for name, labels in measurement.prompt_labels.items()}
    )
    unit = with_scores(unit, output.scores.get(checkpoint.step, {}), output.scores_from)
    unit = with_scores(unit, own_scores, "scores.json of the checkpoint")
    unit.attrs |= {"suite": selection.suite.name, "model_name": checkpoint.source}
    unit.attrs["settings_sha256"] = output.settings_sha256
    files = "in their files" if checkpoint.revision is not None else "in a copy of their files"
    in_files = trained and not measurement.own_code
    unit.attrs["weights_kept"] = "on the device" if resident else files if in_files else "in memory"
    return unit


@contextmanager
def _fingerprint(model: "torch.nn.Module", device: "torch.device") -> Iterator[Future[str]]:
    """Hash a model's weights and buffers; on an accelerator, while the model is measured in this context.

    Raises:
        CheckpointError: if the weights are not finite, in place of what the measurement makes of them.
    """
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    with ThreadPoolExecutor(1) as thread:
        hashed = thread.submit(integrity.fingerprint, model.state_dict().items(), buffers)
        if device.type == "cpu":  # it would take the measurement's cores
            hashed.result()
        try:
            yield hashed
        # Weights that are not finite may be the cause; their own message says which tensors.
        except (FloatingPointError, RuntimeError, ValueError):
            hashed.result()
            raise
        hashed.result()


def _measure(
    measurement: Measurement, settings: Settings, model: "torch.nn.Module", tokenizer: Any
) -> tuple[xr.Dataset, bool]:
    """Measure a loaded model; return its Dataset, and whether all weights were on the device.

    Raises:
        UsageError: if the model does not run on the inputs, or if memory runs out.
    """
    from tracker.blocks.find import find_blocks
    from tracker.devices import is_allocation_failure
    from tracker.measurement import measure_with
    from tracker.model.proposals import TRIED, BlocksNotFound
    from tracker.model.records import describe, is_texts
    from tracker.model.weights import fails_in_forward, weights_memory

    device = measurement.device
    blocks = None
    with suppress(BlocksNotFound):  # a forward pass shows them, or which of its lines work
        blocks = find_blocks(model, measurement.blocks)
    weights = weights_memory(model, blocks, settings.torch_dtype)
    budget = measurement.memory_budget or default_budget(device, weights)
    resident = stays_on_device(device, weights, budget)
    try:
        # Otherwise the weights stay memory-mapped in their files and are loaded block by block
        if resident:
            model.to(device)
        unit = measure_with(
            replace(settings, memory_budget=budget),
            model,
            measurement.inputs,
            tokenizer,
            device,
            blocks,
            measurement.max_tokens,
            progress=False,  # the walk shows its own
        )
    except BlocksNotFound as error:
        lines = "".join(
            f"\n  --blocks {quote(line.names)}  # {line.description}" for line in error.proposals
        )
        raise UsageError(f"{error.finding}\n{TRIED}{lines}" if lines else str(error)) from error
    except Exception as error:  # a model's code may raise errors of any type
        if fails_in_forward(error):
            cut = ", which --max_tokens can cut" if is_texts(measurement.inputs) else ""
            raise UsageError(
                f"the forward pass of {type(model).__name__} fails on the inputs, {describe(measurement.inputs)}{cut}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        if not is_allocation_failure(error):
            raise
        raise UsageError(
            f"memory runs out with a budget of {size(budget)} beside the weights ({first_line(error)}); give a "
            "smaller --memory_budget"
        ) from error
    return unit.assign_attrs(memory_budget=size(budget)), resident


def with_scores(unit: xr.Dataset, scored: Mapping[str, float], source: str) -> xr.Dataset:
    """Add scores, and where they are from, to a unit and return it; an untrained model has no scores."""
    if not scored or str(unit.coords["revision"].item()).startswith(UNTRAINED):
        return unit
    if "score" in unit:
        has = {
            str(task): float(value)
            for task, value in zip(unit["task"].values, unit["score"].values, strict=True)
        }
        scored = has | dict(scored)
        unit = unit.drop_dims("task")
    unit.attrs["scores_from"] = f"{unit.attrs.get('scores_from', '')}; {source}".lstrip("; ")
    return unit.assign(score=xr.DataArray(list(scored.values()), {"task": list(scored)}, "task"))


@dataclass(frozen=True)
class Known:
    """What a walk knows of a unit.

    Attributes:
        likeness: what all units of the store share.
        revision, files_sha256, fingerprint: of the weights.
        token_ids_sha256: of the prompts.
        row: what loggers receive of it, its scores among them.
    """

    likeness: dict[str, set[str]]
    revision: str
    files_sha256: str
    fingerprint: str
    token_ids_sha256: str
    row: Row = field(compare=False)


class Units:
    """The units of a store. The units themselves are on the disk."""

    def __init__(self, store: Store):
        self.store = store
        self.known: dict[int, Known] = {}  # by step

    def read(self, steps: list[int]) -> list[int]:
        """Read units; return the steps whose files are damaged.

        Raises:
            OSError: if a file can't be read at this moment.
            ValueError: if the units make no curve.
        """
        left_out: dict[int, OSError | ValueError] = {}
        for curve in self.store.curves(steps, left_out.__setitem__):
            self.known |= {of.row.step: of for of in _known(curve, Row.from_curve(curve))}
        return [step for step, error in left_out.items() if isinstance(error, DamagedFile)]

    def prepare(self, unit: xr.Dataset) -> tuple[memoryview, Known]:
        """Return the content of a measured unit's file, and what the walk must know of it.

        Raises:
            CheckpointError: if it makes no curve with the units of the store.
        """
        (known,) = _known(unit, [Row.from_unit(unit)])
        for step, other in self.known.items():
            try:
                require_one_curve([other.likeness, known.likeness], self.store.path)
            except ValueError as error:
                raise CheckpointError(
                    f"its results do not belong to the curve of the others: with it and step {step}, {error}. Leave out the one "
                    "that is of another model, or measure it into another --out"
                ) from error
            break  # all others are alike
        return file_content(unlabelled(unit)), known

    def add(self, step: int, content: memoryview, known: Known) -> None:
        """Write a prepared unit whose step is claimed."""
        self.store.write_content(step, content)
        self.known[step] = known

    def changed(self, selection: SelectedCheckpoints) -> list[int]:
        """Return the steps whose weights differ from those that the units were measured from."""
        measured = {
            c: self.known[c.step].files_sha256
            for c in selection.checkpoints
            if c.step in self.known
        }
        return [
            c.step
            for c, digest in measured.items()
            if digest and selection.digest(c) not in ("", digest)
        ]


def _known(ds: xr.Dataset, rows: Iterable[Row]) -> list[Known]:
    """Return what is known of a unit or of the units of a curve, which have these rows."""
    alike = likeness(ds)
    names = ("revision", "files_sha256", "fingerprint", "token_ids_sha256")
    of_steps = zip(*(map(str, by_step(ds, name)) for name in names), strict=True)
    return [Known(alike, *named, row=row) for row, named in zip(rows, of_steps, strict=True)]
