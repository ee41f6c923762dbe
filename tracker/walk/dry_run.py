"""What a walk would fetch, keep and take, from the hub's listings and one timed block; nothing is fetched or written.

The block is randomly initialized, in a model of the suite's configuration with two blocks. Only configuration and tokenizer are
read; where the cache lacks them they are fetched into a temporary directory. Where the hub does not list a checkpoint of Pythia,
its size and configuration are those of the shape that ships with `checkpoints`, and the length of prompts is estimated.
"""

import copy
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoints.configuration import Shape, require_size, weights_in
from checkpoints.disk import missing_files
from checkpoints.fetch import fetch, snapshot_dir
from checkpoints.hub import Listing
from checkpoints.load import load_own_tokenizer, load_tokenizer, read_architecture, readable
from checkpoints.suites import Checkpoint
from tracker.blocks.find import find_blocks
from tracker.common.errors import CheckpointError, UsageError, panics_as_errors
from tracker.common.text import counted, duration, entry, join_names, printable, size
from tracker.measurement import prepared
from tracker.measures.estimate import Cost, estimate
from tracker.model.inputs import batches
from tracker.model.weights import weights_memory
from tracker.walk.display import reason
from tracker.walk.plan import SelectedCheckpoints, WalkPlan, placement

BLOCKS = 2  # of the timed model: one is timed, and another to warm up
# Of a prompt whose tokenizer is not there; the built-in prompts have 4.2 with Pythia's
BYTES_PER_TOKEN = 4
SHIPPED = "checkpoints/data/pythia.toml"
NOT_LISTED = "not listed, and not counted"


def describe(
    plan: WalkPlan,
    missing: Sequence[Checkpoint],
    disk_budget: int | None,
    tokenizer: str | None,
    debug: bool = False,
) -> Iterator[str]:
    """Describe what measuring the missing checkpoints would take: what is known at once, then what one block was timed for.

    Args:
        tokenizer: the tokenizer that replaces the checkpoints' own.
        debug: whether to print the traceback of an error.

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
        for line in _download_lines(plan.selection, missing, disk_budget):
            yield entry(*line)
    try:
        with panics_as_errors():
            timed = _timed(plan, missing, tokenizer)
            cost = _checkpoint_cost(plan, timed)
    except UsageError:
        raise
    except Exception as error:  # whatever is wrong with this revision, the others may be measured
        if debug:
            traceback.print_exception(error)
        yield entry("time", f"not estimated: {printable(reason(error, debug))}")
        return
    yield entry("model", timed.source)
    if not cost.refused:
        yield entry(
            "in all",
            f"about {duration(cost.seconds)} per checkpoint, {duration(cost.seconds * len(missing))} in all, without download, "
            "loading and hashing; estimated, as is the memory below, from one timed block",
        )
    yield from str(cost).splitlines()[1:]


def _download_lines(
    selection: SelectedCheckpoints, missing: Sequence[Checkpoint], disk_budget: int | None
) -> list[tuple[str, str]]:
    """Describe the downloads; files that revisions share count once."""
    shape = selection.suite.shape
    computed = (
        ""
        if shape is None
        else f"computed from the shape that ships in {SHIPPED}, without tokenizers"
    )
    lacking: dict[Any, int] = {}  # bytes
    present: dict[Any, int] = {}
    largest = 0  # bytes of a revision
    sources: Counter[str] = Counter()  # numbers of checkpoints
    for checkpoint in missing:
        listing = selection.listings.get(checkpoint.revision or "")
        if listing is not None and listing.weights:
            sources["as listed"] += 1
            directory = snapshot_dir(checkpoint.source, listing.commit, selection.suite.cache_dir)
            to_fetch = missing_files(directory, listing)
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
        return [("download", "not known: neither the hub nor the cache lists the files")]
    download = sum(size for key, size in lacking.items() if key not in present)
    kept = download if disk_budget is None else min(download, disk_budget)
    limit = (
        "without --disk_budget, nothing is removed"
        if disk_budget is None
        else f"--disk_budget {size(disk_budget)}"
    )
    lines = [
        ("download", f"{size(download)}; {size(sum(present.values()))} are in the cache already"),
        (
            "sizes",
            "; ".join(
                f"{counted(count, 'checkpoint')} {source}"
                for source, count in sources.items()
                if count
            ),
        ),
        ("disk", f"at most {size(kept)} of downloads ({limit}); {size(largest)} per checkpoint"),
    ]
    if disk_budget is not None and largest > disk_budget:
        lines.append(
            (
                "warning",
                "a checkpoint is larger than --disk_budget: it would fail; raise the budget",
            )
        )
    return lines


@dataclass(frozen=True)
class _Timed:
    """What is timed in place of a checkpoint."""

    small: nn.Module  # with `BLOCKS` blocks
    whole: nn.Module  # perhaps without weights
    tokenizer: Any
    source: str  # where the configuration and the tokens are from, in words


def _checkpoint_cost(plan: WalkPlan, timed: _Timed) -> Cost:
    """Return the cost of measuring one checkpoint."""
    measurement, small, whole = plan.measurement, timed.small, timed.whole
    device, settings, blocks = measurement.device, measurement.settings, find_blocks(whole)
    budget, resident = placement(measurement, weights_memory(whole, blocks, settings.torch_dtype))
    if resident:
        small.to(device)
    calls = batches(small, measurement.inputs, timed.tokenizer, measurement.max_tokens)
    settings = replace(settings, memory_budget=budget)
    depth = None if small is whole else len(blocks.names)
    with prepared(small, find_blocks(small), calls, settings, device) as replica:
        cost = estimate(replica, calls, settings, depth)
    stored = sum(tensor.nbytes for tensor in (*whole.parameters(), *whole.buffers()))
    return replace(cost, blocks=str(blocks), weights_bytes=stored)


def _timed(plan: WalkPlan, missing: Sequence[Checkpoint], tokenizer: str | None) -> _Timed:
    """Return a model with `BLOCKS` blocks, the whole model, and the tokenizer.

    Args:
        tokenizer: the tokenizer that replaces the checkpoints' own.

    Raises:
        CheckpointError: if configuration or tokenizer can't be read, or the model can't be built from it.
    """
    selection, measurement = plan.selection, plan.measurement
    replacement = None if tokenizer is None else load_tokenizer(tokenizer)
    of_prompts = isinstance(measurement.inputs, list)
    with_tokenizer = of_prompts and replacement is None
    checkpoint = next(
        (c for c in missing if c.seed is None and c.name not in selection.unlisted), missing[0]
    )
    source = Path(checkpoint.source)
    if checkpoint.revision is None:
        if not measurement.own_code:
            return _from_config(source, weights_in(source), with_tokenizer, replacement)
        model, own = measurement.load(source)  # the user's code makes the model with its weights
        return _Timed(model, model, own, f"loaded from {source}")
    directory = snapshot_dir(checkpoint.source, checkpoint.revision, selection.suite.cache_dir)
    cached = (directory / "config.json").is_file()
    unlisted = selection.offline or selection.unlisted.get(checkpoint.name)
    if unlisted and not cached and selection.suite.shape:
        return _from_shape(selection.suite.shape, of_prompts, replacement)
    listing = selection.listings.get(checkpoint.revision)
    if checkpoint.name in selection.unlisted:
        raise CheckpointError(selection.unlisted[checkpoint.name])
    if not selection.suite.on_hub and not cached:  # the embedded suite
        raise CheckpointError(
            "nano is trained first, in about a minute on two cores; a dry run after that times its blocks"
        )
    if not cached and (listing is None or selection.offline):
        raise CheckpointError(
            f"{checkpoint.source} at {checkpoint.name} is not in the cache, and the hub can't be reached"
        )
    stored = (
        weights_in(directory) if listing is None else sum(file.size for file in listing.weights)
    )
    if listing is None or not missing_files(directory, _without_weights(listing)):
        return _from_config(directory, stored, with_tokenizer, replacement)
    with tempfile.TemporaryDirectory() as temporary:
        fetched = fetch(
            checkpoint.source, checkpoint.revision, _without_weights(listing), Path(temporary)
        )
        return _from_config(fetched, stored, with_tokenizer, replacement)


def _without_weights(listing: Listing) -> Listing:
    weights = set(listing.weights)
    return replace(listing, files=tuple(file for file in listing.needed if file not in weights))


def _from_config(directory: Path, stored: int, with_tokenizer: bool, tokenizer: Any) -> _Timed:
    """Build the models of a directory's configuration.

    Args:
        stored: the bytes of its weight files.
        tokenizer: the tokenizer without that of the directory.

    Raises:
        CheckpointError: if transformers can't, or the files are too small for the model.
    """
    with readable(directory, f"the configuration in {directory}", "no model can be built from it"):
        config, auto = read_architecture(directory)
        dtype = config.dtype or torch.float32
        whole = _without_memory(config, auto, dtype)
        require_size(directory, whole, stored)
        small = _with_few_blocks(config, auto, dtype)
    tokenizer = load_own_tokenizer(directory) if with_tokenizer else tokenizer
    return _Timed(small, whole, tokenizer, "from the checkpoint's configuration and tokenizer")


def _from_shape(shape: Shape, of_prompts: bool, tokenizer: Any) -> _Timed:
    """Build the models of a shape that ships with this package."""
    from transformers import AutoModelForCausalLM

    of_model = shape.config(), AutoModelForCausalLM, torch.float16
    source = f"from the shape in {SHIPPED}, as neither the hub nor the cache has the configuration"
    if of_prompts and tokenizer is None:
        source += f"; lengths of prompts are estimated, a token for every {BYTES_PER_TOKEN} bytes"
    return _Timed(
        _with_few_blocks(*of_model),
        _without_memory(*of_model),
        tokenizer or _estimated_tokens,
        source,
    )


def _without_memory(config: Any, auto: Any, dtype: Any) -> nn.Module:
    with torch.device("meta"):
        return auto.from_config(config, dtype=dtype, trust_remote_code=False).eval()


def _with_few_blocks(config: Any, auto: Any, dtype: Any) -> nn.Module:
    """Build a model with `BLOCKS` blocks, entries of the configuration by block that fit, and random weights."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    depth = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == depth:
            setattr(text, name, value[:BLOCKS])
    text.num_hidden_layers = min(BLOCKS, depth)
    # Weights are drawn, and the caller's generator stays as it is.
    with torch.random.fork_rng():
        return auto.from_config(config, dtype=dtype, trust_remote_code=False).eval()


def _estimated_tokens(text: str, return_tensors: str) -> dict[str, torch.Tensor]:
    """Return as many tokens as a text has about, in place of a tokenizer."""
    return {
        "input_ids": torch.arange(max(1, round(len(text.encode()) / BYTES_PER_TOKEN)))[None] % 1000
    }
