"""Walk a suite of training checkpoints: fetch, measure, store and show each, `python -m tracker.pythia --model 12b`.

One unit of result per revision in OUT/units, written whole or not at all; a second run does only what is missing.
Exit status: 0 all measured; 1 some revision failed, or writing did (what was finished is kept); 2 bad usage; 130
interrupted. Nothing heavy is imported before the arguments have been read.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from checkpoints import nano, scores
from checkpoints.hub import CheckpointError
from checkpoints.suites import Checkpoint, Suite, find_suite
from tracker.prompts import load_prompts, prompts_digest

if TYPE_CHECKING:
    import xarray as xr

    from tracker.results import Store

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m tracker.pythia", description=Walk.__doc__ and Walk.__doc__.split("Args:")[0]
    )
    parser.add_class_arguments(Walk, as_group=False)
    parser.add_argument("--config", action="config", help="a YAML file with any of these settings")
    parsed = parser.parse_args(arguments)
    walk = Walk(**{name: value for name, value in parsed.as_dict().items() if name != "config"})
    # What a cluster sends at the end of a job's time is answered like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(walk)
    except BrokenPipeError:  # whoever read the output has gone; finished revisions are kept
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted; finished revisions are kept, and the same command goes on with the rest", file=sys.stderr)
        return INTERRUPTED


def run(walk: Walk) -> int:
    """Walk the checkpoints; returns the exit status."""
    from tracker.blocks import UsageError
    from tracker.dashboards import resolve_mode
    from tracker.report import write_report

    try:
        plan = make_plan(walk)
        mode = resolve_mode(walk.wandb)
    except (ValueError, CheckpointError, OSError) as error:
        return _usage_error(error)
    units = {step: _readable(plan.store, step) for step in plan.store.steps()}
    missing = [checkpoint for checkpoint in plan.checkpoints if units.get(checkpoint.step) is None]
    print(
        f"{plan.suite.name}: {len(plan.checkpoints)} checkpoints, {len(plan.checkpoints) - len(missing)} already "
        f"measured; {len(plan.prompts)} prompts; {plan.device}, {walk.dtype}; results in {plan.store.path}",
        flush=True,
    )
    if plan.suite.notice:
        print(f"note: {plan.suite.notice}", flush=True)
    failed: dict[int, str] = {}
    try:
        if walk.model == "nano" and missing and not nano.is_trained(walk.seed):
            nano.train(walk.seed)
        with _wandb(plan, mode, walk) as log, _progress(len(missing)) as advance:
            for unit in filter(None, units.values()):
                log(unit)
            for checkpoint in missing:
                started = time.perf_counter()
                try:
                    unit = measure_checkpoint(plan, checkpoint)
                # A revision that can't be fetched, loaded, or held in memory; the others may.
                except (CheckpointError, FloatingPointError, OSError, RuntimeError) as error:
                    failed[checkpoint.step] = f"{type(error).__name__}: {error}"
                    advance(f"step {checkpoint.step}: FAILED, {error}")
                    continue
                plan.store.write(checkpoint.step, unit)
                log(unit)
                advance(f"step {checkpoint.step}: {_headline(unit)}  ({time.perf_counter() - started:.1f} s)")
        if plan.store.steps():
            print(f"page: {write_report(plan.store.path, plan.store.path / 'report.html')}", flush=True)
    except UsageError as error:
        return _usage_error(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename or plan.store.path
        print(
            f"error: can't write to {where} ({error.strerror or error}); finished revisions are kept: make room or give "
            "another --out, and run the same command again",
            file=sys.stderr,
        )
        return FAILED
    for step, reason in failed.items():
        print(f"failed: step {step}: {reason}", file=sys.stderr)
    return FAILED if failed else OK


def _readable(store: "Store", step: int) -> "xr.Dataset | None":
    """A unit of an earlier walk; None, with a notice, if its file is damaged."""
    try:
        return store.read(step)
    except ValueError as error:
        print(f"{error}: it is measured again", file=sys.stderr)
        store.file(step).unlink()
        return None


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

    from checkpoints import hub
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


def _headline(unit: "xr.Dataset") -> str:
    from tracker.statistics import curves

    points = curves(unit)
    k = int(points["k"][0])
    at = {"k": k, "pairs": "mean_offdiag"}
    value, null = float(points["miscoupling"].sel(at)), float(points["miscoupling_null"].sel(at))
    return f"miscoupling {value:.3f} (null {null:.3f}, K={k})  LSS {float(points['lss'].sel(statistic='median')):.2f}"


def _usage_error(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return USAGE


@contextmanager
def _wandb(plan: Plan, mode: Literal["online", "offline", "disabled"], walk: Walk) -> Iterator[Callable[[Any], None]]:
    """Log units to W&B; where it can't be reached, offline; says which, once."""
    if mode == "disabled":
        yield lambda unit: None
        return
    from wandb.errors import CommError

    from tracker.dashboards import WandbLog

    config = {"model": plan.suite.source, "prompts": walk.prompts, "dtype": walk.dtype, "device": plan.device}
    arguments = (plan.store, walk.project, plan.suite.name, config)
    try:
        log = WandbLog(mode, *arguments)
    except CommError as error:
        print(f"W&B can't be reached ({error}); logging offline", file=sys.stderr)
        log = WandbLog("offline", *arguments)
    try:
        yield log.log
    finally:
        print(log.finish(), flush=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Count revisions done: a bar with rate and ETA on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console()
    if not console.is_terminal:
        started, done = time.perf_counter(), 0

        def advance(line: str) -> None:
            nonlocal done
            done += 1
            remaining = (time.perf_counter() - started) / done * (total - done)
            print(f"[{done}/{total}] {line}  about {remaining:.0f} s left", flush=True)

        yield advance
        return
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)

        def advance_bar(line: str) -> None:
            progress.console.print(line, markup=False, highlight=False)
            progress.advance(task)

        yield advance_bar


if __name__ == "__main__":
    sys.exit(main())
