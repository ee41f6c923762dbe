"""Refuse a configuration that asks for sizes that the files can't hold, or for code that is no part of transformers."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.hub import INDEX
from tracker.common.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

CONFIGURATION = "config.json"
# Entries that make transformers build as many modules, or entries of a dictionary, and how many there may be: the deepest
# published language models have about 130 blocks, the largest classifiers 22,000 labels.
COUNTS = {r"layers?$|depths?$|blocks$|experts$|groups?$|group_num$|stages$|codebooks$": 1000, r"labels$": 100_000}
VALUES_PER_BYTE = 8  # weights quantized to one bit
MOST_BUFFERED = 10**9  # values, beyond those that the files can hold, in masks and tables that a model computes itself
# Any other implementation is code of a package that may not be there, or that transformers fetches from the hub.
IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


def check_configuration(directory: Path) -> None:
    """Check the configuration in a checkpoint's directory before transformers reads it.

    Raises:
        CheckpointError: if it is no mapping, or has an absurd count or an implementation that is no part of transformers.
    """
    _check_entries(directory / CONFIGURATION, _entries(directory / CONFIGURATION))


def _check_entries(file: Path, value: Any, name: str = "") -> None:
    """Check a configuration, or the entry `name` of one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # An implementation may be given for each part: {"text_config": "sdpa"}.
            _check_entries(file, inner, name if name.endswith("_implementation") else key)
    elif isinstance(value, list):
        for inner in value:
            _check_entries(file, inner, name)
    most = next((most for pattern, most in COUNTS.items() if re.search(pattern, name)), None)
    if most is not None and isinstance(value, int) and value > most:
        raise CheckpointError(
            f"{file} has {name} = {value:,}; more than {most:,} can't be meant: restore the file, or leave this checkpoint out"
        )
    if name.endswith("_implementation") and not isinstance(value, dict) and value not in IMPLEMENTATIONS:
        raise CheckpointError(
            f"{file} asks for {name} = {value!r}, which transformers would take from another package or fetch from the hub and "
            f"run; {', '.join(map(str, IMPLEMENTATIONS[1:]))} are allowed: remove the entry, or leave this checkpoint out"
        )


def check_index(directory: Path) -> None:
    """Check the form of the index of weights in several files, if there is one.

    Raises:
        CheckpointError: if it does not map tensors to files.
    """
    for name in INDEX.values():
        if (directory / name).is_file():
            shards = _entries(directory / name).get("weight_map")
            if not (isinstance(shards, dict) and all(isinstance(shard, str) for shard in shards.values())):
                raise CheckpointError(f"{directory / name} has no weight_map from tensors to files: restore it")
            if outside := [shard for shard in shards.values() if Path(shard).name != shard]:
                raise CheckpointError(
                    f"{directory / name} names {outside[0]!r}, which is no file of its directory: restore it, or leave this "
                    "checkpoint out"
                )


def weights_in(directory: Path) -> int:
    """Return the bytes of a directory's weight files."""
    return sum(file.stat().st_size for file in directory.iterdir() if file.suffix in (".safetensors", ".bin"))


def require_size(directory: Path, model: "nn.Module", stored: int) -> None:
    """Compare a model without memory with the size of its weight files.

    Raises:
        CheckpointError: if the files are too small for the model, or it has absurdly many values besides parameters.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    others = sum(buffer.numel() for buffer in model.buffers())
    described = f"{count:,} parameters" + (f" and {others:,} other values" if others > MOST_BUFFERED else "")
    if count > VALUES_PER_BYTE * stored or others > VALUES_PER_BYTE * stored + MOST_BUFFERED:
        raise CheckpointError(
            f"{directory / CONFIGURATION} describes a model of {described}, and the weight files hold {stored:,} bytes: restore "
            "its files, or leave this checkpoint out"
        )


def _entries(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise CheckpointError(
            f"{file} can't be read as JSON ({error}): restore it, or leave this checkpoint out"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} is not a mapping of settings: restore it, or leave this checkpoint out")
    return entries
