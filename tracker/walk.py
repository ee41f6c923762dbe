"""What a walk is asked for, what that comes to, and one checkpoint measured.

Nothing heavy is imported before it is needed: the command line reads this file to print its help.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from checkpoints import hub, scores
from checkpoints.suites import Checkpoint, Suite, find_suite
from tracker.prompts import load_prompts, prompts_digest

if TYPE_CHECKING:
    import xarray as xr

    from tracker.results import Store


@dataclass
class Walk:
    """Measure block coupling, LSS and expodistance at the training checkpoints of a language model.

    Exit status: 0 all measured; 1 some revision failed (listed at the end, the others kept); 2 bad usage.

    Args:
        model: nano (trained here where it is absent), a Pythia size (14m to 12b, with -deduped or -seedN after it), a
            Hugging Face repository id, or a directory of checkpoints.
        steps: paper (Fig. 1b), all, log2, scores (those with benchmark results), or numbers such as 128,512. Default:
            paper for Pythia, all for others.
        prompts: builtin, or a file: text with one prompt a line, or JSONL with "prompt".
        k: how many top singular vectors, one number or several such as 10,30. Default: those of 10, 30, 50 not above
            the model's width.
        tokens: whose Jacobians: last, all, or positions such as 0,-1.
        final_norm: include the final norm in the last block, exclude it, or drop that block. Default: include where
            the model has one.
        max_tokens: cut longer prompts to this many tokens; without it a prompt beyond the context is refused.
        out: directory of the results; an existing one is completed. Default: results/MODEL.
        device: cpu, cuda, cuda:1 and so on. Default: CUDA where present.
        dtype: precision of the measurement, whatever the weights are stored in.
        wandb: auto is online where a key is set up, else offline.
        project: the W&B project.
        seed: of the embedded suite's training.
    """

    model: str
    steps: int | str | None = None
    prompts: str = "builtin"
    k: int | str | None = None
    tokens: int | str = "last"
    final_norm: Literal["auto", "include", "exclude", "drop"] = "auto"
    max_tokens: int | None = None
    out: Path | None = None
    device: str | None = None
    dtype: Literal["float32", "float64"] = "float32"
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    project: str = "block-coupling"
    seed: int = 0


@dataclass
class Plan:
    """A walk whose settings have been checked."""

    suite: Suite
    checkpoints: tuple[Checkpoint, ...]
    prompts: list[str]
    measure: dict[str, Any]  # keywords of `tracker.measure`
    device: str
    store: "Store"
    settings: str  # a hash of what the store is measured with
    scores: dict[int, dict[str, float]]


def make_plan(walk: Walk) -> Plan:
    """Check a walk's settings before anything is fetched or trained.

    Raises:
        ValueError, CheckpointError: for settings that can't be used; the message says what is allowed.
    """
    import torch

    from tracker.provenance import SCHEMA
    from tracker.results import Store

    suite = find_suite(walk.model, walk.seed)
    published = scores.published(suite.name)
    prompts = load_prompts(walk.prompts)
    device = walk.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} can't be used ({str(error).splitlines()[0]})") from error
    keywords = {
        "k": sorted(set(_numbers("--k", walk.k))) if walk.k is not None else None,
        "tokens": walk.tokens if walk.tokens in ("last", "cls", "all") else _numbers("--tokens", walk.tokens),
        "final_norm": walk.final_norm,
        "max_tokens": walk.max_tokens,
    }
    if keywords["k"] and keywords["k"][0] < 1:
        raise ValueError(f"--k {walk.k}; each K must be at least 1")
    checkpoints = suite.chosen(None if walk.steps is None else str(walk.steps), published)
    store = Store(walk.out or Path("results") / suite.name)
    identity = {
        "schema": SCHEMA,
        "model": suite.source,
        "prompts": prompts_digest(prompts),
        "dtype": walk.dtype,
        **keywords,
    }
    if walk.model == "nano":
        identity["suite"] = suite.cache_dir and suite.cache_dir.name
    store.settle(identity)
    settings = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    keywords["dtype"] = getattr(torch, walk.dtype)
    return Plan(suite, checkpoints, prompts, keywords, device, store, settings, published)


def measure_checkpoint(plan: Plan, checkpoint: Checkpoint) -> "xr.Dataset":
    """Fetch, load and measure one checkpoint; the unit says which it was."""
    import xarray as xr

    from tracker.measurement import measure

    directory = Path(checkpoint.source)
    if checkpoint.revision is not None:
        local_only = plan.suite.cache_dir is not None
        directory = hub.fetch(checkpoint.source, checkpoint.revision, plan.suite.cache_dir, local_only)
    model, tokenizer = hub.load(directory)
    unit = measure(model, plan.prompts, tokenizer=tokenizer, device=plan.device, **plan.measure)
    unit = unit.assign_coords(
        step=checkpoint.step,
        revision=checkpoint.revision or "",
        commit=directory.name if checkpoint.revision else "",
    )
    if checkpoint.tokens is not None:
        unit = unit.assign_coords(tokens_seen=checkpoint.tokens)
    scored = plan.scores.get(checkpoint.step, {}) | scores.brought(directory)
    if scored:
        unit["score"] = xr.DataArray(list(scored.values()), {"task": list(scored)}, "task")
    unit.attrs |= {"suite": plan.suite.name, "model_name": checkpoint.source, "settings_sha256": plan.settings}
    return unit


def _numbers(option: str, text: int | str) -> list[int]:
    try:
        return [int(number) for number in str(text).split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text!r}; give whole numbers with commas between them") from error
