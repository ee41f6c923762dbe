"""Read a checkpoint's configuration; refuse sizes that its files can't hold, and Python code that nobody approved.

transformers runs the Python files of a checkpoint that names them in `auto_map`, or asks on the terminal whether to. Here they
run only if the user approved their content: by a commit of the repository, or by the digest of a directory's files.
"""

import hashlib
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from checkpoints.fetch import fetch, snapshot_dir
from checkpoints.hub import CODE, INDEX, Listing, list_files
from checkpoints.retries import Notify
from tracker.common.errors import CheckpointError, Unreachable

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

CONFIGURATION, TOKENIZER = "config.json", "tokenizer_config.json"
# Entries that make transformers build as many modules, or entries of a dictionary, and how many there may be: the deepest
# published language models have about 130 blocks, the largest classifiers 22,000 labels.
COUNTS = {r"layers?$|depths?$|blocks$|experts$|groups?$|group_num$|stages$|codebooks$": 1000, r"labels$": 100_000}
VALUES_PER_BYTE = 8  # weights quantized to one bit
MOST_BUFFERED = 10**9  # values, beyond those that the files can hold, in masks and tables that a model computes itself
# Any other implementation is code of a package that may not be there, or that transformers fetches from the hub.
IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
OWN_CODE = "transformers_modules"  # the package of modules that transformers makes of checkpoints' code
MODULE = r"[A-Za-z_]\w*\.[A-Za-z_]\w*"  # a class in a file of the checkpoint's directory


def read_config(directory: Path, own_code: bool = False) -> "PreTrainedConfig":
    """Read the configuration of a checkpoint's directory.

    Args:
        own_code: whether the checkpoint's code may run (`runs_own_code`).

    Raises:
        CheckpointError: if it is no mapping, would make transformers build more modules than any model has, or asks for
            code of the hub.
        Exception: whatever transformers raises for entries that it can't use.
    """
    from transformers import AutoConfig

    _check_entries(directory / CONFIGURATION, _entries(directory / CONFIGURATION))
    return AutoConfig.from_pretrained(directory, trust_remote_code=own_code)


def _check_entries(file: Path, value: Any, name: str = "") -> None:
    """Check a configuration, or the entry `name` of one, before transformers reads it.

    Raises:
        CheckpointError: for an absurd count, or for an implementation that is not part of transformers and torch.
    """
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


def check_size(directory: Path, config: "PreTrainedConfig", auto: Any, own_code: bool = False) -> None:
    """Compare the number of parameters in a configuration with the size of the weight files, before weights are allocated.

    Args:
        auto: the class of transformers that builds the model.

    Raises:
        CheckpointError: if the files are too small for the model.
    """
    import torch

    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=own_code)
    require_size(directory, model, weights_in(directory))


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


def runs_own_code(directory: Path, approved: str) -> bool:
    """Whether a checkpoint names Python code of its own, and the user approved it.

    Args:
        approved: the digest of the approved code (`code_digest`), or "".

    Raises:
        CheckpointError: if it names other code than the approved one.
    """
    if not approved:
        return False
    maps = [
        _entries(directory / name).get("auto_map")
        for name in (CONFIGURATION, TOKENIZER)
        if (directory / name).is_file()
    ]
    named = [str(reference) for reference in _leaves(maps) if reference is not None]
    if not named:
        return False
    if outside := [reference for reference in named if not re.fullmatch(MODULE, reference)]:
        raise CheckpointError(
            f"{directory} needs code of another repository or directory ({outside[0]}), which can't be approved; copy it into "
            "the checkpoint's directory"
        )
    found = code_digest(directory)
    if found != approved:
        raise CheckpointError(
            f"the Python files of {directory} (digest {found}) are not those that --trust_remote_code approves (digest "
            f"{approved}); read them, and approve them in a walk of their own"
        )
    return True


def _leaves(value: Any) -> list[Any]:
    """Return the values within dictionaries and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for inner in value for leaf in _leaves(inner)] if isinstance(value, list) else [value]


def code_digest(directory: Path) -> str:
    """Return a hash of the names and contents of the Python files in and below a directory; "" without any."""
    files = sorted(directory.rglob(f"*{CODE}"))
    lines = [f"{file.relative_to(directory)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16] if files else ""


def fetch_code(repo: str, commit: str, cache_dir: Path | None = None, notify: Notify = print) -> str:
    """Return the digest of the Python files of a repository at a commit; fetch them, or read the cache without a connection.

    Raises:
        CheckpointError: if there is no such commit, or it has no Python files.
    """
    try:
        listing = list_files(repo, {commit: commit}, cache_dir, notify=notify).get(commit)
        if listing is None:
            raise CheckpointError(f"--trust_remote_code {commit}: {repo} has no such commit")
        code = Listing(commit, tuple(f for f in listing.files if f.name.endswith(CODE)), with_code=True)
        with TemporaryDirectory() as temporary:
            digest = code_digest(fetch(repo, commit, code, Path(temporary), notify=notify)) if code.needed else ""
    except Unreachable:
        digest = code_digest(snapshot_dir(repo, commit, cache_dir))
    if not digest:
        raise CheckpointError(f"--trust_remote_code {commit}: {repo} has no Python files at this commit")
    return digest


def describe_refusal(directory: Path) -> str:
    """Describe that a checkpoint's own code is not run, and how to approve it."""
    if directory.parent.name == "snapshots":  # of the hub's cache
        repo = directory.parent.parent.name.removeprefix("models--").replace("--", "/")
        where, value = f"the Python files of {repo} at commit {directory.name}", directory.name
    else:
        value = code_digest(directory)
        where = f"its Python files (digest {value})"
    return (
        f"{directory} needs Python code of its own, which is not run; to run it, read {where}, and add "
        f"--trust_remote_code {value}"
    )


def _entries(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise CheckpointError(
            f"{file} can't be read as JSON ({error}): restore it, or leave this checkpoint out"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not a mapping of settings: restore it, or leave this checkpoint out")
    return found
