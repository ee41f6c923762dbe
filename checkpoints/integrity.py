"""Whether a revision holds what its name says: by the hashes of its files before any download, by its tensors after loading.

Two steps of one training never share a weight file, whether whole or a shard, so a file that several revisions share is
the right one in at most one of them. The last step is taken for the owner of what it shares. Of others none is known to
be, and all are suspect: a curve with a false point is worse than a gap. Steps 0 and 1 may agree by design: a warm-up that
starts at rate zero leaves the weights as they were (EleutherAI/gpt-neox issue 1373).
"""

import hashlib
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints import files, hub
from checkpoints.hub import CheckpointError, File, Listing, missing_shards
from checkpoints.suites import Checkpoint, Suite, join_names

if TYPE_CHECKING:
    from torch import Tensor

DEFECTS = Path(__file__).parent / "data" / "defects.toml"
ZERO_RATE = (
    "steps 0 and 1 hold the same weights: a warm-up that starts at rate zero leaves them as they were, by design"
)
COMPARED = 200  # revisions that are all asked for
HASHING_AT_ONCE = 4  # tensors
HASHED_TOGETHER = 1 << 22  # values, held once more in float32


@dataclass(frozen=True)
class Examination:
    """What the hub says about a suite, before any download."""

    listings: dict[str, Listing]  # by revision
    suspect: dict[int, str]  # the chosen steps that are not to be trusted, and why
    offline: str = ""  # why the hub could not be asked, or ""


def examine(suite: Suite, chosen: Sequence[Checkpoint], notify: hub.Notify = print) -> Examination:
    """Ask for the files of a suite's revisions and compare them.

    All revisions are compared, or, of suites with more than 200, the chosen ones and the last. A suite that is not on the
    hub has no listings.
    """
    if not suite.on_hub:
        return Examination({}, {})
    try:
        commits, offline = hub.list_branches(suite.source, notify)
    except hub.Unreachable as error:  # what others have found wrong is known all the same
        commits, offline = {}, str(error)
    every = suite.checkpoints
    compared = every if len(every) <= COMPARED else tuple(dict.fromkeys((*chosen, every[-1])))
    there = {c.name: commits[c.name] for c in compared if c.name in commits}
    listings = hub.list_files(suite.source, there, suite.cache_dir, bool(offline), notify)
    doubted = find_suspects(compared, listings, online=not offline)
    return Examination(listings, {c.step: doubted[c.step] for c in chosen if c.step in doubted}, offline)


def find_suspects(
    checkpoints: Sequence[Checkpoint], listings: Mapping[str, Listing], online: bool = True
) -> dict[int, str]:
    """Why each doubtful checkpoint is doubted, by step: known defects, missing files, files of other revisions.

    Args:
        checkpoints: all of a suite whose listings are to be compared, the last of the training among them.
        listings: by revision; one that is absent is missing on the hub, if it was asked.
        online: whether the hub was asked; the cache alone does not say what is missing.
    """
    reasons: dict[int, list[str]] = defaultdict(list)
    for checkpoint in checkpoints:
        if known := known_defect(checkpoint):
            reasons[checkpoint.step].append(known)
        listing = listings.get(checkpoint.name)
        if listing is not None:
            reasons[checkpoint.step] += _missing(listing)
        elif online:
            reasons[checkpoint.step].append(f"{checkpoint.source} has no revision {checkpoint.name}")
    by_step = {c.step: listings[c.name].weights for c in checkpoints if c.name in listings}
    for step, reason in _shared(by_step, last=max(c.step for c in checkpoints)).items():
        reasons[step].append(reason)
    return {step: "; ".join(reasons[step]) for step in sorted(reasons) if reasons[step]}


def known_defect(checkpoint: Checkpoint) -> str | None:
    """What others have found wrong with a revision, and where they say so."""
    for defect in _table():
        steps = {
            *defect["steps"],
            *(s for first, last, every in defect.get("ranges", ()) for s in range(first, last + 1, every)),
        }
        if (checkpoint.source, checkpoint.stage) == (
            defect["source"],
            defect.get("stage", ""),
        ) and checkpoint.step in steps:
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
    """What is doubtful about files that several steps share, by step."""
    owners: dict[str, list[int]] = defaultdict(list)
    for step, of_step in sorted(weights.items()):
        for digest in {file.sha256 for file in of_step if file.sha256}:
            owners[digest].append(step)
    reasons = {}
    for step, of_step in weights.items():
        foreign = [file for file in of_step if step in _doubted(owners.get(file.sha256 or "", []), last)]
        if not foreign:
            continue
        others = sorted({other for file in foreign for other in owners[file.sha256 or ""]} - {step})
        what = (
            "its weights are"
            if len(foreign) == len(of_step)
            else f"{len(foreign)} of its {len(of_step)} shards are mixed in:"
        )
        reasons[step] = f"{what} those of step {join_names(others)}, bit for bit"
    return reasons


def _doubted(steps: Sequence[int], last: int) -> set[int]:
    """Those of the steps sharing a file that are not known to own it."""
    if last in steps:
        return set(steps) - {last}
    if {0, 1} <= set(steps):
        return set(steps) - {0, 1}
    return set(steps) if len(steps) > 1 else set()


def find_repeats(fingerprints: Mapping[int, str]) -> dict[int, int]:
    """For each step whose weights an earlier step had: the first that had them."""
    first: dict[str, int] = {}
    found = {}
    for step, fingerprint in sorted(fingerprints.items()):
        if fingerprint and first.setdefault(fingerprint, step) != step:
            found[step] = first[fingerprint]
    return found


def describe_repeat(step: int, earlier: int) -> str:
    """A repetition in words."""
    if (earlier, step) == (0, 1):
        return ZERO_RATE
    return f"steps {earlier} and {step} hold the same weights in every tensor: at least one of them is not what its name says"


def files_digest(directory: Path, listing: Listing | None = None) -> str:
    """A hash of a checkpoint's weight files, from the hub's listing where it has them, else from the files.

    It tells a retrained directory and a moved branch from the weights that were measured, without loading anything.
    """
    if directory.is_file():
        return files.sha256(directory)[:16]
    if listing is None or not all(file.sha256 for file in listing.weights):
        listing = files_in(directory)
    lines = [f"{file.name} {file.sha256 or files.sha256(directory / file.name)}\n" for file in listing.weights]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def files_in(directory: Path) -> Listing:
    """A listing of what a directory holds, for checkpoints that no hub lists."""
    return Listing("", tuple(File(p.name, p.stat().st_size) for p in sorted(directory.iterdir()) if p.is_file()))


def fingerprint(tensors: Iterable[tuple[str, "Tensor"]]) -> str:
    """A hash of named tensors: of their names, shapes and values, whatever their order, file format or storage dtype.

    Values are hashed in float32, so a checkpoint stored in bfloat16 or float16 and its float32 copy agree. About 1 GB/s of
    float32 for each of up to four threads.

    Raises:
        CheckpointError: if a tensor holds NaN or infinite values; names those.
    """
    workers = min(HASHING_AT_ONCE, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        hashed = sorted(pool.map(_hash, *zip(*tensors, strict=True)))
    broken = [name for name, digest in hashed if digest is None]
    if broken:
        raise CheckpointError(f"NaN or infinite weights in {join_names(broken)}; nothing is measured from them")
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in hashed).encode()).hexdigest()[:16]


def _hash(name: str, tensor: "Tensor") -> tuple[str, str | None]:
    import torch

    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.is_floating_point()}\n".encode())
    for values in tensor.detach().reshape(-1).split(HASHED_TOGETHER):
        values = values.cpu()
        if values.is_floating_point():
            if not torch.isfinite(values).all():
                return name, None
            values = values if values.dtype == torch.float64 else values.float()
        digest.update(values.view(torch.uint8).numpy().data)
    return name, digest.hexdigest()
