"""What a walk would fetch, keep and take, from the hub's listings and one timed block; nothing is fetched or written.

The block is randomly initialized, in a model of the suite's configuration with two blocks. Only configuration and tokenizer are
read; where the cache lacks them they are fetched into a temporary directory. Where the hub does not list a checkpoint of Pythia,
its size and configuration are those of the shape that ships with `checkpoints`, and the length of prompts is estimated.
"""

import copy
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import integrity
from checkpoints.configuration import Shape, require_size, weights_in
from checkpoints.disk import missing_files
from checkpoints.fetch import fetch, snapshot_dir
from checkpoints.hub import Listing
from checkpoints.load import load_own_tokenizer, load_tokenizer, read_architecture, readable
from checkpoints.suites import Checkpoint
from tracker.common.errors import CheckpointError, UsageError, panics_as_errors
from tracker.common.text import counted, join_names, printable
from tracker.walk.display import reason
from tracker.walk.plan import SelectedCheckpoints, WalkPlan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tracker.measures.estimate import Cost

BLOCKS = 2  # of the timed model: one is timed, and another to warm up
BYTES_PER_TOKEN = 4  # of a prompt whose tokenizer is not there; the built-in prompts have 4.2 with Pythia's
SHIPPED = "checkpoints/data/pythia.toml"


@dataclass(frozen=True)
class Downloads:
    """The files of the checkpoints to measure, in bytes; files that revisions share count once."""

    download: int
    cached: int
    largest: int  # of a revision
    shipped: int  # number of checkpoints without a listing whose size is that of a shipped shape
    unknown: int  # number of the others without a listing


def downloads(selection: SelectedCheckpoints, checkpoints: Sequence[Checkpoint]) -> Downloads:
    """Add up what fetching some checkpoints takes."""
    shape = selection.suite.shape
    lacking: dict[Any, int] = {}
    present: dict[Any, int] = {}
    largest = shipped = unknown = 0
    for checkpoint in checkpoints:
        listing = selection.listings.get(checkpoint.revision or "")
        if listing is None or not listing.weights:  # without a connection, what the cache has of it is listed
            if shape is None:
                unknown += 1
                continue
            shipped += 1
            largest = max(largest, shape.file_bytes)
            lacking[checkpoint] = shape.file_bytes
            continue
        directory = snapshot_dir(checkpoint.source, listing.commit, selection.suite.cache_dir)
        missing = missing_files(directory, listing)
        for file in listing.needed:
            key = file.blob or (listing.commit, file.name)
            (lacking if file in missing else present)[key] = file.size
        largest = max(largest, listing.bytes)
    download = sum(size for key, size in lacking.items() if key not in present)
    return Downloads(download, sum(present.values()), largest, shipped, unknown)


def describe(
    plan: WalkPlan, missing: Sequence[Checkpoint], disk_budget: int | None, tokenizer: str | None, debug: bool = False
) -> Iterator[str]:
    """Describe what measuring the missing checkpoints would take: what is known at once, then what one block was timed for.

    Args:
        tokenizer: the tokenizer that replaces the checkpoints' own.
        debug: whether to print the traceback of an error.

    Raises:
        UsageError: if the model can't be measured with these settings.
    """
    from tracker.common.text import duration, entry, size

    yield entry("dry run", "nothing is fetched, measured or written")
    yield entry("to measure", f"{len(missing)}: step {join_names(c.step for c in missing)}" if missing else "none")
    if not missing:
        return
    if plan.selection.suite.on_hub:
        for line in _download_lines(plan, missing, disk_budget):
            yield entry(*line)
    try:
        timed = _timed(plan, missing, tokenizer)
        cost, hashing = checkpoint_cost(plan, timed)
    except UsageError:
        raise
    except Exception as error:  # whatever is wrong with this revision, the others may be measured
        if debug:
            traceback.print_exception(error)
        yield entry("time", f"not estimated: {printable(reason(error, debug))}")
        return
    each = cost.seconds + hashing
    yield entry("model", timed.source)
    if not cost.refused:
        total = f"about {duration(each)} per checkpoint (of it hashing the weights {duration(hashing)}), " + (
            f"{duration(each * len(missing))} in all, without download and loading"
        )
        yield entry("in all", f"{total}; estimated, as are time and memory below, from one timed block")
    if (host := _memory()) and cost.peak_bytes > host:
        yield entry("warning", f"a measurement takes more memory than this machine has ({size(host)})")
    yield from str(cost).splitlines()[1:]


def _download_lines(plan: WalkPlan, missing: Sequence[Checkpoint], disk_budget: int | None) -> list[tuple[str, str]]:
    """Describe the downloads."""
    from tracker.common.text import size

    total = downloads(plan.selection, missing)
    if total.unknown == len(missing):
        return [("download", "not known: neither the hub nor the cache lists the files")]
    listed = len(missing) - total.shipped - total.unknown
    sources = [f"as listed, for {counted(listed, 'checkpoint')}"] if listed else []
    if total.shipped and (shape := plan.selection.suite.shape):
        sources.append(
            f"computed, not listed, for {counted(total.shipped, 'checkpoint')}: {shape.parameters:,} parameters in float16 and "
            f"causal masks, of the shape that ships in {SHIPPED}; without tokenizers"
        )
    if total.unknown:
        sources.append(f"without {counted(total.unknown, 'checkpoint')} not listed")
    kept = total.download if disk_budget is None else min(total.download, disk_budget)
    limit = "without --disk_budget, nothing is removed" if disk_budget is None else f"--disk_budget {size(disk_budget)}"
    lines = [
        ("download", f"{size(total.download)}; {size(total.cached)} are in the cache already"),
        ("sizes", "; ".join(sources)),
        ("disk", f"at most {size(kept)} of downloads ({limit}); {size(total.largest)} per checkpoint"),
    ]
    if disk_budget is not None and total.largest > disk_budget:
        lines.append(("warning", "a checkpoint is larger than --disk_budget: it would fail; raise the budget"))
    return lines


@dataclass(frozen=True)
class _Timed:
    """What is timed in place of a checkpoint."""

    small: "nn.Module"  # with `BLOCKS` blocks
    whole: "nn.Module"  # perhaps without weights
    tokenizer: Any
    source: str  # where the configuration and the tokens are from, in words


@panics_as_errors()
def checkpoint_cost(plan: WalkPlan, timed: _Timed) -> "tuple[Cost, float]":
    """Return the cost of measuring one checkpoint, and the seconds of hashing its weights."""
    from tracker.blocks.find import find_blocks
    from tracker.capture.inputs import batches
    from tracker.capture.weights import weights_memory
    from tracker.measurement import estimate_cost
    from tracker.walk.plan import default_budget, stays_on_device

    measurement, small, whole = plan.measurement, timed.small, timed.whole
    device, settings = measurement.device, measurement.settings
    weights = weights_memory(whole, find_blocks(whole), settings.torch_dtype)
    budget = measurement.memory_budget or default_budget(device, weights)
    if stays_on_device(device, weights, budget):
        small.to(device)
    calls = batches(small, measurement.inputs, timed.tokenizer, measurement.max_tokens)
    depth = len(find_blocks(whole).names)
    cost = estimate_cost(
        small,
        find_blocks(small),
        calls,
        replace(settings, memory_budget=budget),
        device,
        depth if small is not whole else None,
    )
    stored = sum(tensor.nbytes for tensor in whole.state_dict().values())
    sample = dict(list(small.state_dict().items())[-20:])
    started = time.perf_counter()
    integrity.fingerprint(sample.items())
    hashing = (time.perf_counter() - started) * stored / max(1, sum(tensor.nbytes for tensor in sample.values()))
    return replace(cost, blocks=str(find_blocks(whole)), weights_bytes=stored), hashing


@panics_as_errors()
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
    checkpoint = next((c for c in missing if c.seed is None and c.name not in selection.unlisted), missing[0])
    source = Path(checkpoint.source)
    if checkpoint.revision is None:
        if (source / "config.json").is_file():
            return _from_config(source, weights_in(source), with_tokenizer, replacement)
        model, own = measurement.load(source)  # a file of Lightning, whose class makes the model with its weights
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
    stored = weights_in(directory) if listing is None else sum(file.size for file in listing.weights)
    if listing is None or not missing_files(directory, _without_weights(listing)):
        return _from_config(directory, stored, with_tokenizer, replacement)
    with tempfile.TemporaryDirectory() as temporary:
        fetched = fetch(checkpoint.source, checkpoint.revision, _without_weights(listing), Path(temporary))
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
    import torch

    with readable(directory, f"the configuration in {directory}", "no model can be built from it"):
        config, auto = read_architecture(directory)
        small, whole = _models(
            config, auto, config.dtype or torch.float32, partial(require_size, directory, stored=stored)
        )
    tokenizer = load_own_tokenizer(directory) if with_tokenizer else tokenizer
    return _Timed(small, whole, tokenizer, "from the checkpoint's configuration and tokenizer")


def _from_shape(shape: Shape, of_prompts: bool, tokenizer: Any) -> _Timed:
    """Build the models of a shape that ships with this package."""
    import torch
    from transformers import AutoModelForCausalLM

    small, whole = _models(shape.config(), AutoModelForCausalLM, torch.float16)
    source = f"from the shape in {SHIPPED}, as neither the hub nor the cache has the configuration"
    if of_prompts and tokenizer is None:
        source += f"; lengths of prompts are estimated, a token for every {BYTES_PER_TOKEN} bytes"
    return _Timed(small, whole, tokenizer or _estimated_tokens, source)


def _models(
    config: Any, auto: Any, dtype: Any, check: "Callable[[nn.Module], None]" = lambda _: None
) -> "tuple[nn.Module, nn.Module]":
    """Build a model with few blocks and random weights, once the whole one, without weights, has passed the check."""
    import torch

    with torch.device("meta"):
        whole = auto.from_config(config, dtype=dtype, trust_remote_code=False)
    check(whole)
    with torch.random.fork_rng():
        small = auto.from_config(_with_few_blocks(config), dtype=dtype, trust_remote_code=False)
    return small.eval(), whole.eval()


def _estimated_tokens(text: str, return_tensors: str) -> "dict[str, torch.Tensor]":
    """Return as many tokens as a text has about, in place of a tokenizer."""
    import torch

    return {"input_ids": torch.arange(max(1, round(len(text.encode()) / BYTES_PER_TOKEN)))[None] % 1000}


def _with_few_blocks(config: Any) -> Any:
    """Return a configuration with `BLOCKS` blocks, and entries by block that fit."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    depth = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == depth:
            setattr(text, name, value[:BLOCKS])
    text.num_hidden_layers = min(BLOCKS, depth)
    return config


def _memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
