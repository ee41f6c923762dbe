"""Integrity checks of checkpoints: file hashes before a download and of what is measured, tensor values after loading.

Two steps of a training run never have a weight file or shard in common, so a file that several revisions share belongs to
at most one of them. A file shared with the last step is attributed to the last step. Otherwise the owner is unknown, and
all revisions that share the file are suspect: a wrong point in a curve is worse than a gap. Steps 0 and 1 may legitimately
agree: a warm-up that starts at learning rate zero leaves the weights unchanged (EleutherAI/gpt-neox issue 1373).
"""

import hashlib
import os
import tomllib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import hub
from checkpoints.hub import File, Listing, missing_shards
from checkpoints.retries import Notify
from checkpoints.suites import Checkpoint, Suite
from tracker.common import files
from tracker.common.errors import CheckpointError, Unreachable
from tracker.common.text import join_names

if TYPE_CHECKING:
    from torch import Tensor

DEFECTS = Path(__file__).parent / "data" / "defects.toml"
COMPARED = 200  # up to this many revisions, all are compared
HASH_THREADS = 4
LOGS = (".log", ".txt", ".jsonl")
# Begins of names of what Trainer and accelerate save beside the weights.
STATE = (
    "optimizer",
    "scheduler",
    "scaler",
    "sampler",
    "rng_state",
    "random_states",
    "training_args",
    "dl_state",
)
HASH_CHUNK = 1 << 22  # values that a thread converts to float32 at a time


@dataclass(frozen=True)
class Examination:
    """The hub's metadata of a suite, before any download."""

    listings: dict[str, Listing]  # by revision
    suspect: dict[int, str]  # reasons by step, for the chosen steps
    offline: str = ""  # why the hub could not be reached, or ""
    # Why the files of revisions are not known
    unlisted: dict[str, str] = field(default_factory=dict)


def examine(
    suite: Suite, chosen: Sequence[Checkpoint], notify: Notify = print, ask: bool = True
) -> Examination:
    """List the files of a suite's revisions and compare their hashes.

    All revisions are compared; of a suite with more than 200, only the chosen ones and the last. Those that the hub does not
    list are reported and not compared. A suite that is not on the hub has no listings. Unless `ask`, the hub is not asked.
    """
    if not suite.on_hub:
        return Examination({}, {})
    try:
        commits, offline = (
            hub.list_branches(suite.source, notify)
            if ask
            else (hub.cached_branches(suite.source), "")
        )
    except Unreachable as error:  # the table of known defects works offline
        commits, offline = {}, str(error.__cause__)
    from_hub = ask and not offline
    every = suite.checkpoints
    compared = every if len(every) <= COMPARED else tuple(dict.fromkeys((*chosen, every[-1])))
    published = {c.name: commits[c.name] for c in compared if c.name in commits}
    listings, faults = hub.list_revisions(
        suite.source, published, suite.cache_dir, not from_hub, notify
    )
    if not_compared := [c.name for c in compared if c.name in faults]:
        first = not_compared[0]
        notify(
            f"{join_names(not_compared)} can't be compared with the others; {first}: {faults[first]}"
        )
    suspect = find_suspects(compared, listings, online=from_hub, unlisted=faults)
    unlisted = {revision: str(error) for revision, error in faults.items()}
    return Examination(
        listings, {c.step: suspect[c.step] for c in chosen if c.step in suspect}, offline, unlisted
    )


def find_suspects(
    checkpoints: Sequence[Checkpoint],
    listings: Mapping[str, Listing],
    online: bool = True,
    unlisted: Container[str] = (),
) -> dict[int, str]:
    """Find suspect checkpoints and return the reasons by step: known defects, missing files, files of other revisions.

    Args:
        checkpoints: the checkpoints to compare, including the last of the training.
        listings: by revision. With `online`, a revision without a listing is missing on the hub.
        online: whether the listings come from the hub; a revision missing from the cache may still exist.
        unlisted: revisions of which the hub gives no listing.
    """
    reasons: dict[int, list[str]] = defaultdict(list)
    for checkpoint in checkpoints:
        if defect := known_defect(checkpoint):
            reasons[checkpoint.step].append(defect)
        listing = listings.get(checkpoint.name)
        if listing is not None:
            reasons[checkpoint.step] += _missing(listing)
        elif online and checkpoint.name not in unlisted:
            reasons[checkpoint.step].append(
                f"{checkpoint.source} has no revision {checkpoint.name}"
            )
    by_step = {c.step: listings[c.name].weights for c in checkpoints if c.name in listings}
    for step, reason in _shared(by_step, last=max(c.step for c in checkpoints)).items():
        reasons[step].append(reason)
    return {step: "; ".join(reasons[step]) for step in sorted(reasons) if reasons[step]}


def known_defect(checkpoint: Checkpoint) -> str | None:
    """Return the reported defect of a revision with a link to the report, or None."""
    for defect in _table():
        steps = set(defect["steps"])
        steps.update(
            *(range(first, last + 1, every) for first, last, every in defect.get("ranges", ()))
        )
        where = (defect["source"], defect.get("stage", ""))
        if where == (checkpoint.source, checkpoint.stage) and checkpoint.step in steps:
            return f"{defect['reason']} ({defect['link']})"
    return None


@cache
def _table() -> list[dict]:
    return tomllib.loads(DEFECTS.read_text())["defect"]


def _missing(listing: Listing) -> list[str]:
    names = {file.name for file in listing.files}
    if not listing.weights:
        return ["no weight files (model*.safetensors or pytorch_model*.bin)"]
    absent = missing_shards(listing.weights) + ([] if "config.json" in names else ["config.json"])
    return [f"without {join_names(absent)}"] if absent else []


def _shared(weights: Mapping[int, Sequence[File]], last: int) -> dict[int, str]:
    """Find weight files that several steps share, and return the reasons by step."""
    owners: dict[str, list[int]] = defaultdict(list)
    for step, of_step in sorted(weights.items()):
        for digest in {file.sha256 for file in of_step if file.sha256}:
            owners[digest].append(step)
    reasons = {}
    for step, of_step in weights.items():
        foreign = [
            file
            for file in of_step
            if step in _without_owner(owners.get(file.sha256 or "", []), last)
        ]
        if not foreign:
            continue
        others = sorted({other for file in foreign for other in owners[file.sha256 or ""]} - {step})
        which = (
            "weights"
            if len(foreign) == len(of_step)
            else f"shards ({len(foreign)} of {len(of_step)})"
        )
        reasons[step] = f"its {which} are identical to those of step {join_names(others)}"
    return reasons


def _without_owner(steps: Sequence[int], last: int) -> set[int]:
    """Return those of the steps that share a file which are not known to own it."""
    if last in steps:
        return set(steps) - {last}
    if {0, 1} <= set(steps):
        return set(steps) - {0, 1}
    return set(steps) if len(steps) > 1 else set()


def files_digest(
    source: Path,
    listing: Listing | None = None,
    own_code: bool = False,
    hash_of: Callable[[Path], str] = files.sha256,
) -> str:
    """Hash a checkpoint's weight files, using the hashes of the hub's listing if present, else the files.

    The digest reveals that a directory was retrained or that a branch moved since the measurement, without loading weights.

    Args:
        own_code: whether the user's code loads the checkpoint.
        hash_of: what returns the SHA-256 of a file.
    """
    if source.is_file():
        return hash_of(source)[:16]
    hashes = {file.name: file.sha256 for file in listing.weights} if listing is not None else {}
    if not hashes or not all(hashes.values()):
        hashes = {
            str(file.relative_to(source)): hash_of(file) for file in weight_files(source, own_code)
        }
    lines = [f"{name} {digest}\n" for name, digest in hashes.items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def weight_files(directory: Path, own_code: bool) -> list[Path]:
    """List the weight files of a directory: those that transformers reads.

    Of a directory that the user's code loads, only this code knows what it reads: all files in it and below are listed, except
    hidden ones, logs and states of a training.
    """
    if not own_code:
        return [directory / file.name for file in files_in(directory).weights]
    return [
        file
        for file in files.visible(directory)
        if not file.name.startswith(STATE) and file.suffix not in LOGS
    ]


def files_in(directory: Path) -> Listing:
    """List the files of a directory, for checkpoints that are not on the hub."""
    return Listing(
        "",
        tuple(File(p.name, p.stat().st_size) for p in sorted(directory.iterdir()) if p.is_file()),
    )


def fingerprint(state: Iterable[tuple[str, Any]], buffers: Container[str] = ()) -> str:
    """Hash the names, shapes and values of a state dict's tensors, independent of their order, file format and storage dtype.

    Values are hashed in float32, so a checkpoint stored in bfloat16 or float16 and its float32 copy agree. The rate is about
    1 GB/s of float32 for each of up to four threads.

    Args:
        buffers: names of tensors that may be infinite, as causal masks are.

    Raises:
        CheckpointError: if a tensor contains NaN, or infinite values and is no buffer; the message names the tensors.
    """
    import torch

    # Beside tensors, a state dict holds whatever `get_extra_state` returns.
    named = [(name, value) for name, value in state if isinstance(value, torch.Tensor)]
    infinite = [name in buffers for name, _ in named]
    workers = min(HASH_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        hashed = sorted(pool.map(_hash, *zip(*named, strict=True), infinite))
    not_finite = [name for name, digest in hashed if digest is None]
    if not_finite:
        raise CheckpointError(
            f"NaN or infinite weights in {join_names(not_finite)}; this checkpoint is not measured: leave its step out"
        )
    return hashlib.sha256(
        "".join(f"{name} {digest}\n" for name, digest in hashed).encode()
    ).hexdigest()[:16]


def _hash(name: str, tensor: "Tensor", infinite: bool) -> tuple[str, str | None]:
    """Return a tensor's name and hash; None for a tensor with NaN, or with infinities unless they are allowed."""
    import torch

    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.is_floating_point()}\n".encode())
    # Sparse tensors have no flat form, and views of conjugates or negatives no bytes.
    dense = tensor.detach().to_dense().resolve_conj().resolve_neg()
    for values in dense.reshape(-1).split(HASH_CHUNK):
        values = values.cpu()
        if values.is_floating_point():
            if (values.isnan() if infinite else ~values.isfinite()).any():
                return name, None
            values = values if values.dtype == torch.float64 else values.float()
        digest.update(values.view(torch.uint8).numpy().data)
    return name, digest.hexdigest()
