"""What a walk is asked for, and what that comes to, checked before anything is fetched.

Nothing heavy is imported before it is needed: the command line reads this file to print its help.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from checkpoints import hub, integrity, scores
from checkpoints.disk import DiskBudget
from checkpoints.suites import UNTRAINED, Checkpoint, Suite, find_suite
from tracker.walk.prompts import load_prompts, prompts_digest

if TYPE_CHECKING:
    import torch

    from tracker.results import Store


@dataclass
class Walk:
    """Measure block coupling, LSS and expodistance at the training checkpoints of a model.

    Exit status: 0 all measured; 1 some revision failed (listed at the end, the others kept); 2 bad usage.

    Args:
        model: nano (trained here where it is absent), a Pythia size (14m to 12b, with -deduped or -seedN after it), a
            Hugging Face repository id, or a directory of checkpoints.
        steps: paper (Fig. 1b), all, log2, scores (those with benchmark results), or numbers such as 128,512. Default:
            paper for Pythia, all for others.
        revisions: a regular expression with a group named step (and perhaps tokens, in billions, and stage), where
            branches or directories are not spelled like step128 or checkpoint-128.
        stage: of a suite trained in several, such as OLMo 2. Default: the first.
        untrained: measure the model at a random initialisation of this seed too, as step 0, where none is published.
        allow_suspect: measure revisions too that seem not to hold what their name says; their points are marked.
        disk_budget: how much of the disk downloads may take, such as 60GB; measured revisions that this program fetched
            make room. Default: no limit, nothing is removed.
        scores: a CSV file, an lm-evaluation-harness JSON file or a directory of either, with scores by step.
        module: the class of Lightning checkpoints, as package.module:Class; MODEL is then a .ckpt file or a directory.
        tokenizer: of Lightning checkpoints, a repository or directory; the module's forward takes what it gives.
        inputs: a .pt file with what the model's forward takes, in place of prompts.
        prompts: builtin; openllm (1,200 from the leaderboard's six benchmarks) or wikitext (100 paragraphs), fetched once;
            gsm8k (200 of them); easy2hard (200, rated by difficulty); or a file: text with one prompt a line, or JSONL with
            "prompt" and perhaps "difficulty" and "source".
        suffix: text to append to every prompt, such as " Let's think step by step.".
        measures: all, or some of coupling, trajectory, vju, matrices, tokenwise, entropy, pca and noise (see
            `tracker.measure`), with commas between them. Default: coupling,trajectory.
        k: how many top singular vectors, one number or several such as 10,30. Default: those of 10, 30, 50 not above
            the model's width.
        tokens: whose Jacobians: last, cls, all, or positions such as 0,-1.
        final_norm: include the final norm in the last block, exclude it, or drop that block. Default: include where
            the model has one.
        max_tokens: cut longer prompts to this many tokens; without it a prompt beyond the context is refused.
        out: directory of the results; an existing one is completed, also by several walks at once. Default:
            results/MODEL.
        device: cpu, cuda, cuda:1 and so on. Default: CUDA where present.
        dtype: precision of the measurement, whatever the weights are stored in.
        memory_budget: what to work with above the weights, such as 3GB. Weights stay in their files and pass through
            memory block by block, unless the device is not the CPU and all of them fit into half of this. Default: half of
            a GPU's memory, a quarter of the machine's.
        loggers: where curves are logged, names with commas between them: wandb. --loggers= logs nowhere.
        wandb: auto is online where a key is set up, else offline.
        project: the W&B project.
        seed: of the embedded suite's training.
        workers: so many further walks on Ray, beside this one; they share the revisions out among them.
        address: of a Ray cluster; without it the workers are on this machine.
    """

    model: str
    steps: int | str | None = None
    revisions: str | None = None
    stage: str | None = None
    untrained: int | None = None
    allow_suspect: bool = False
    disk_budget: str | None = None
    scores: Path | None = None
    module: str | None = None
    tokenizer: str | None = None
    inputs: Path | None = None
    prompts: str = "builtin"
    suffix: str = ""
    measures: str | None = None
    k: int | str | None = None
    tokens: int | str = "last"
    final_norm: Literal["auto", "include", "exclude", "drop"] = "auto"
    max_tokens: int | None = None
    out: Path | None = None
    device: str | None = None
    dtype: Literal["float32", "float64"] = "float32"
    memory_budget: str | None = None
    loggers: str = "wandb"
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    project: str = "block-coupling"
    seed: int = 0
    workers: int = 0
    address: str | None = None


@dataclass
class Plan:
    """A walk whose settings have been checked, and what the hub says about its checkpoints."""

    suite: Suite
    checkpoints: tuple[Checkpoint, ...]  # to be measured
    excluded: dict[int, str]  # the chosen steps that are not, and why
    suspect: dict[int, str]  # steps that are, though they are doubted, and why
    listings: dict[str, hub.Listing]  # by revision
    offline: str  # why the hub can't be asked, or ""
    disk: DiskBudget
    load: Callable[[Path], tuple[Any, Any]]  # a directory to a model and, where inputs are prompts, a tokenizer
    inputs: Any
    of_prompts: dict[str, list]  # what is known of each: difficulty, prompt_source
    measure: dict[str, Any]  # keywords of `tracker.measure`
    device: "torch.device"
    store: "Store"
    settings: str  # a hash of what the store is measured with
    scores: scores.Scores
    notices: list[str]

    def digest(self, checkpoint: Checkpoint) -> str:
        """A hash of the weight files that would be measured now; "" where there are none, or only fetching would tell."""
        if checkpoint.seed is not None:
            return ""
        directory, listing = Path(checkpoint.source), None
        if checkpoint.revision is not None:
            listing = self.listings.get(checkpoint.revision)
            if listing is not None and all(file.sha256 for file in listing.weights):
                return integrity.files_digest(directory, listing)
            try:
                directory = self.cached(checkpoint)
            except hub.CheckpointError:
                return ""
        return integrity.files_digest(directory, listing)

    def cached(self, checkpoint: Checkpoint) -> Path:
        """The directory of a revision that is in the cache."""
        from checkpoints.fetch import cached_snapshot

        return cached_snapshot(checkpoint.source, checkpoint.revision or "main", self.suite.cache_dir)


def untrained(seed: int | None) -> str:
    """What a unit's `revision` says of a model at its initialisation."""
    return f"{UNTRAINED}{seed}"


def make_plan(walk: Walk, notify: Callable[[str], None] = print) -> Plan:
    """Check a walk's settings, and what the hub says about its revisions, before anything is fetched or trained.

    Raises:
        ValueError, CheckpointError: for settings that can't be used; the message says what is allowed.
    """
    import torch

    from tracker.measures.settings import Settings
    from tracker.provenance import SCHEMA, settings_digest, usable_device
    from tracker.results import Store

    suite = find_suite(walk.model, walk.seed, walk.revisions, walk.stage, walk.module is not None, notify)
    joined = scores.read_user_scores(walk.scores, suite) if walk.scores else scores.load_published(suite.name)
    prompts, inputs, of_prompts = _inputs(walk)
    load = _loader(walk)
    device = walk.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = usable_device(device, f"--device {device}")
    keywords = {
        "k": sorted(set(numbers("--k", walk.k))) if walk.k is not None else None,
        "tokens": walk.tokens if walk.tokens in ("last", "cls", "all") else numbers("--tokens", walk.tokens),
        "final_norm": walk.final_norm,
        "max_tokens": walk.max_tokens,
    }
    if walk.measures is not None:
        keywords["measures"] = list(
            Settings(measures=tuple(sorted({name.strip() for name in walk.measures.split(",")}))).measures
        )
    if walk.workers < 0 or (walk.address and not walk.workers):
        raise ValueError(f"--workers {walk.workers}; give how many walks are to be started on Ray, at least 1")
    if keywords["k"] and keywords["k"][0] < 1:
        raise ValueError(f"--k {walk.k}; each K must be at least 1")
    disk = DiskBudget(suite.cache_dir, None if walk.disk_budget is None else _bytes("--disk_budget", walk.disk_budget))
    memory = _memory(device) if walk.memory_budget is None else _bytes("--memory_budget", walk.memory_budget)
    chosen = suite.select(None if walk.steps is None else str(walk.steps), joined)
    examined = integrity.examine(suite, chosen, notify)
    excluded = {} if walk.allow_suspect else examined.suspect
    kept = tuple(checkpoint for checkpoint in chosen if checkpoint.step not in excluded)
    if walk.untrained is not None and not 0 <= walk.untrained < 2**63:
        raise ValueError(f"--untrained {walk.untrained}; a seed is a whole number from 0 to 2^63 - 1")
    if walk.untrained is not None and walk.module:
        raise ValueError(
            f"--untrained {walk.untrained}: only its own code knows how {walk.module} is initialised; leave it out"
        )
    if walk.untrained is not None and kept:
        kept = (suite.untrained(kept[0], walk.untrained), *kept)

    store = Store(walk.out or Path("results") / suite.name)
    identity = {"schema": SCHEMA, "model": suite.source, "prompts": prompts, "dtype": walk.dtype, **keywords}
    # Named only where given, like the measures: a store keeps its identity when an option is added here.
    identity |= {"pair_layers": 1} if {"tokenwise", "all"} & {*keywords.get("measures", ())} else {}
    identity |= {"suite": suite.name} if suite.checkpoints[0].stage else {}
    identity |= {"module": walk.module, "tokenizer": walk.tokenizer} if walk.module else {}
    if suite.cache_dir is not None:
        identity["suite"] = suite.cache_dir.name
    store.settle(identity)
    if walk.untrained is not None and store.has(0):
        found = store.revision(0)
        if found != untrained(walk.untrained):
            raise ValueError(
                f"--untrained {walk.untrained}: {store.path} has another step 0 ({found}); choose another --out"
            )
    settings = settings_digest(identity)
    keywords |= {"dtype": getattr(torch, walk.dtype), "memory_budget": memory}
    notices = [suite.notice] if suite.notice else []
    if joined:
        where = walk.scores or "the suite's own, zero-shot"
        trained = [checkpoint.step for checkpoint in kept if checkpoint.seed is None]
        notices.append(scores.describe_coverage(joined, trained, str(where)))
    return Plan(
        suite=suite,
        checkpoints=kept,
        excluded=excluded,
        suspect=examined.suspect if walk.allow_suspect else {},
        listings=examined.listings,
        offline=examined.offline,
        disk=disk,
        load=load,
        inputs=inputs,
        of_prompts=of_prompts,
        measure=keywords,
        device=device,
        store=store,
        settings=settings,
        scores=joined,
        notices=notices,
    )


def _inputs(walk: Walk) -> tuple[str, Any, dict[str, list]]:
    """A hash of what every checkpoint is measured on, it itself, and what is known of its prompts, as coordinates."""
    from tracker.provenance import digest

    if walk.inputs is None:
        prompts = [prompt._replace(text=prompt.text + walk.suffix) for prompt in load_prompts(walk.prompts)]
        known = {name: [getattr(prompt, name) for prompt in prompts] for name in ("difficulty", "source")}
        known = {name: labels for name, labels in known.items() if None not in labels}
        if "source" in known:
            known["prompt_source"] = known.pop("source")
        return prompts_digest(prompts), [prompt.text for prompt in prompts], known
    import torch

    try:
        inputs = torch.load(walk.inputs, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"--inputs {walk.inputs} can't be read ({hub.first_line(error)}); give a file that torch.save wrote, with a tensor "
            "or a dictionary of tensors"
        ) from error
    return digest(inputs)[:16], inputs, {}


def _loader(walk: Walk) -> Callable[[Path], tuple[Any, Any]]:
    from checkpoints import load

    if walk.module is None:
        if walk.inputs is None:
            return load.load
        return lambda directory: (load.load_model(directory), None)
    if walk.inputs is None and walk.tokenizer is None:
        raise ValueError("--module needs --tokenizer NAME for the prompts, or --inputs FILE in their place")
    load_file = load.lightning_loader(walk.module)
    tokenizer = load.load_tokenizer(walk.tokenizer) if walk.inputs is None and walk.tokenizer else None
    return lambda file: (load_file(file), tokenizer)


def numbers(option: str, text: int | str) -> list[int]:
    """Whole numbers with commas between them, as `option` gives them.

    Raises:
        ValueError: for anything else.
    """
    try:
        return [int(number) for number in str(text).split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text!r}; give whole numbers with commas between them") from error


def _memory(device: "torch.device") -> int:
    """What a walk works with unless it is told: it depends on the machine, not on what happens to be free."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def _bytes(option: str, size: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB)?", size.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{option} {size!r}; give a number with a unit, such as 60GB (10^9 bytes) or 500MB")
    return round(float(match[1]) * 1000 ** ("B", "KB", "MB", "GB", "TB").index((match[2] or "B").upper()))
