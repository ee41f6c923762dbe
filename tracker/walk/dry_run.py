"""What a walk would fetch, keep and take, by arithmetic from the hub's listings and a checkpoint's configuration.

The model is built from the configuration without weights. Where the cache lacks the configuration it is fetched into a temporary
directory. Of Pythia, sizes and configurations are those of the shape that ships with `checkpoints` where the cache has none, and
the hub is not asked. Prompts are not tokenized: their lengths are estimated, a token for every four bytes.
"""

import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPTNeoXForCausalLM

from checkpoints.configuration import require_size, weights_in
from checkpoints.fetch import fetch, snapshot_dir
from checkpoints.load import read_architecture, readable
from checkpoints.suites import Checkpoint
from tracker.blocks.find import find_blocks
from tracker.common.errors import CheckpointError, UsageError, panics_as_errors
from tracker.common.text import counted, duration, entry, join_names, printable, size
from tracker.measurement import prepared
from tracker.measures.cost import (
    Case,
    Cost,
    cost_of,
    cost_of_calls,
    named_machine,
    this_machine,
)
from tracker.model.inputs import batches
from tracker.model.weights import weights_memory
from tracker.walk.command import Walk
from tracker.walk.display import main_input, reason
from tracker.walk.plan import Measurement, SelectedCheckpoints, WalkPlan, default_budget

BYTES_PER_TOKEN = 4  # the built-in prompts have 4.2 with Pythia's tokenizer
SHIPPED = "checkpoints/data/pythia.toml"
NOT_LISTED = "not listed, and not counted"


def describe(plan: WalkPlan, missing: Sequence[Checkpoint], walk: Walk) -> Iterator[str]:
    """Describe what measuring the missing checkpoints would take.

    Raises:
        UsageError: if the model can't be measured with these settings.
    """
    yield entry("dry run", "nothing is fetched, measured or written")
    yield entry(
        "to measure",
        f"{len(missing)}: step {join_names(c.step for c in missing)}" if missing else "none",
    )
    if not missing:
        return
    if plan.selection.suite.on_hub:
        yield from _download_lines(plan.selection, missing, walk.disk_budget)
    try:
        with panics_as_errors():
            source, cost = _checkpoint_cost(plan, missing, walk)
    except UsageError:
        raise
    except Exception as error:  # whatever is wrong with this revision, the others may be measured
        if walk.debug:
            traceback.print_exception(error)
        yield entry("time", f"not estimated: {printable(reason(error, walk.debug))}")
        return
    yield entry("model", source)
    yield entry(
        "in all",
        f"about {duration(cost.seconds * len(missing))}, {duration(cost.seconds)} per checkpoint, without download, loading "
        "and hashing",
    )
    yield from str(cost).splitlines()[1:]


def _download_lines(
    selection: SelectedCheckpoints, missing: Sequence[Checkpoint], disk_budget: int | None
) -> Iterator[str]:
    """Describe the downloads; files that revisions share count once."""
    shape = selection.suite.shape
    computed = f"computed from the shape that ships in {SHIPPED}, without tokenizers"
    lacking: dict[Any, int] = {}  # bytes
    present: dict[Any, int] = {}
    largest = 0  # bytes of a revision
    sources: Counter[str] = Counter()  # numbers of checkpoints
    for checkpoint in missing:
        listing = selection.listings.get(checkpoint.revision or "")
        if listing is not None and listing.weights:
            sources["as listed"] += 1
            to_fetch = selection.to_fetch(checkpoint, listing)
            for file in listing.needed:
                # Revisions share files, of which the cache has one.
                key = file.blob or (listing.commit, file.name)
                (lacking if file in to_fetch else present)[key] = file.size
            largest = max(largest, listing.bytes)
        elif shape is not None:  # without a connection, what the cache has of it is listed
            sources[computed] += 1
            largest = max(largest, shape.file_bytes)
            lacking[checkpoint] = shape.file_bytes
        else:
            sources[NOT_LISTED] += 1
    if sources[NOT_LISTED] == len(missing):
        yield entry("download", "not known: neither the hub nor the cache lists the files")
        return
    download = sum(lacking[key] for key in lacking.keys() - present)
    kept, limit = download, "without --disk_budget, nothing is removed"
    if disk_budget is not None:
        kept, limit = min(download, disk_budget), f"--disk_budget {size(disk_budget)}"
    counts = [f"{counted(count, 'checkpoint')} {source}" for source, count in sources.items()]
    cached = sum(present.values())
    yield entry(
        "download",
        f"{size(download)}, {duration(8 * download / 1e9)} at 1 Gbit/s; {size(cached)} are in the cache already",
    )
    yield entry("sizes", "; ".join(counts))
    yield entry(
        "disk", f"at most {size(kept)} of downloads ({limit}); {size(largest)} per checkpoint"
    )
    if disk_budget is not None and largest > disk_budget:
        yield entry(
            "warning", "a checkpoint is larger than --disk_budget: it would fail; raise the budget"
        )


def _checkpoint_cost(plan: WalkPlan, missing: Sequence[Checkpoint], walk: Walk) -> tuple[str, Cost]:
    """Return where the model's shape is from, in words, and the cost of measuring one checkpoint."""
    measurement, settings = plan.measurement, plan.measurement.settings
    dtype = settings.torch_dtype
    machine = named_machine(walk.on) if walk.on else this_machine(measurement.device, dtype)
    config = tokenizer = None
    if measurement.own_code:  # the user's code makes the model with its weights
        source = f"loaded from {missing[0].source}"
        model, tokenizer = measurement.load(Path(missing[0].source))
    else:
        model, config, source = _model(plan.selection, missing)
    blocks = find_blocks(model, measurement.blocks)
    default = default_budget(machine.device, weights_memory(model, blocks, dtype), machine.memory)
    settings = replace(settings, memory_budget=measurement.memory_budget or default)
    if config is None:
        calls = batches(model, measurement.inputs, tokenizer, measurement.max_tokens)
        with prepared(model, blocks, calls, settings, measurement.device) as replica:
            return source, cost_of_calls(replica, calls, settings, machine)
    lengths = _lengths(measurement, config)
    chosen = settings.chosen_tokens(blocks)
    of_sample = len(chosen) if isinstance(chosen, tuple) else 1
    case = Case(
        model,
        blocks,
        lengths,
        rows=sum(lengths) if chosen == "all" else len(lengths) * of_sample,
        width=config.get_text_config().hidden_size,
        depth=len(blocks.names),
        normed=settings.final_norm != "exclude" and bool(blocks.include_final_norm),
    )
    return source, cost_of(case, settings, machine)


def _lengths(measurement: Measurement, config: Any) -> list[int]:
    """Return the number of tokens of each sample: of prompts estimated, of images that of their patches."""
    inputs, most = main_input(measurement.inputs), measurement.max_tokens
    if isinstance(inputs, list):
        estimated = [max(1, len(prompt.encode()) // BYTES_PER_TOKEN) for prompt in inputs]
        return [min(length, most or length) for length in estimated]
    length = inputs.shape[1]
    if inputs.ndim == 4:
        length = inputs.shape[2] * inputs.shape[3] // config.patch_size**2
    return [length] * len(inputs)


def _model(
    selection: SelectedCheckpoints, missing: Sequence[Checkpoint]
) -> tuple[nn.Module, Any, str]:
    """Return a checkpoint's model without weights, its configuration, and where that is from, in words.

    Raises:
        CheckpointError: if the configuration can't be read, or no model can be built from it.
    """
    suite = selection.suite
    checkpoint = next(
        (c for c in missing if c.seed is None and c.name not in selection.unlisted), missing[0]
    )
    if checkpoint.revision is None:
        directory = Path(checkpoint.source)
        return _from_config(directory, weights_in(directory))
    directory = snapshot_dir(checkpoint.source, checkpoint.revision, suite.cache_dir)
    listing = selection.listings.get(checkpoint.revision)
    if (directory / "config.json").is_file():
        listed = sum(file.size for file in listing.weights) if listing else 0
        return _from_config(directory, listed or weights_in(directory))
    if suite.shape:
        config = suite.shape.config()
        model = _without_memory(config, GPTNeoXForCausalLM, torch.float16)
        return model, config, f"from the shape in {SHIPPED}, as the cache has no configuration"
    if listing is None:
        why = selection.unlisted.get(checkpoint.name, selection.offline or "it is trained first")
        raise CheckpointError(
            f"the cache has no configuration of {checkpoint.source} at {checkpoint.name}: {why}"
        )
    configuration = replace(
        listing, files=tuple(file for file in listing.files if file.name == "config.json")
    )
    with tempfile.TemporaryDirectory() as temporary:
        fetched = fetch(checkpoint.source, checkpoint.revision, configuration, Path(temporary))
        return _from_config(fetched, sum(file.size for file in listing.weights))


def _from_config(directory: Path, stored: int) -> tuple[nn.Module, Any, str]:
    """Build the model of a directory's configuration; `stored` is the number of bytes of its weight files."""
    with readable(directory, f"the configuration in {directory}", "no model can be built from it"):
        config, architecture = read_architecture(directory)
        model = _without_memory(config, architecture, config.dtype or torch.float32)
        require_size(directory, model, stored)
    return model, config, "from the checkpoint's configuration"


def _without_memory(config: Any, architecture: type[nn.Module], dtype: Any) -> nn.Module:
    with torch.device("meta"):
        return architecture(config).to(dtype).eval()
