"""Suites of training checkpoints: the published steps, the revision of each, and the number of training tokens.

A family of suites is defined by two patterns, for repository ids and for revision names; to add one, add an entry to
`FAMILIES`. Pythia (Biderman et al. 2023) and PolyPythias (van der Wal et al. 2025) are listed in full: sizes 14m to 12b, and
their variants in `PYTHIA_VARIANTS`; each with 154 checkpoints, at steps 0, 1, 2, 4 .. 512 and every 1000 to 143000, of 2,097,152
tokens per step. For other repositories the branches are listed, for directories the subdirectories; names that do not match the
pattern are ignored.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from glob import escape, glob
from itertools import pairwise
from pathlib import Path
from shlex import quote

from checkpoints import hub, nano
from checkpoints.configuration import Shape, pythia_shapes
from checkpoints.retries import Notify
from tracker.common.files import read_json, visible
from tracker.common.text import counted, join_names

PYTHIA_SIZES = tuple(pythia_shapes())
# By a pattern of what follows the size: how a message spells it, and the sizes that have it
PYTHIA_VARIANTS = {
    "-deduped": ("-deduped", PYTHIA_SIZES[2:]),
    "-seed[1-9]": ("-seed1 to -seed9", PYTHIA_SIZES[:5]),
    "-(data|weight)-seed[1-3]": (
        "-data-seed1 to -data-seed3 and -weight-seed1 to -weight-seed3",
        ("160m",),
    ),
}
PYTHIA_STEPS = (0, *(2**i for i in range(10)), *range(1000, 144_000, 1000))
PYTHIA_TOKENS_PER_STEP = 2_097_152
UNKNOWN = 1  # the step assigned to a checkpoint of unknown step: after step 0, the untrained model
PAPER_STEPS = (128, 256, 512, *(1000 * 2**i for i in range(8)), 143_000)  # Fig 1b


@dataclass(frozen=True)
class Family:
    """The naming patterns of a family of suites."""

    repositories: str  # matches a whole repository id
    # Searched in a revision's name; group step, and optionally tokens (billions) and stage
    revisions: str


OLMO = Family(r"allenai/OLMo(E|-1B|-7B|-1\.7).*", r"^step(?P<step>\d+)-tokens(?P<tokens>\d+)B$")
OLMO_2 = Family(
    r"allenai/OLMo-2-.*",
    r"^(?P<stage>stage\d+(?:-ingredient\d+)?)-step(?P<step>\d+)-tokens(?P<tokens>\d+)B$",
)
ANY = Family(r".*", r"(?:step|checkpoint)[-_=]?(?P<step>\d+)")
FAMILIES = (OLMO_2, OLMO, ANY)
LAST_NUMBER = r"^.*(?<!\d)(?<!\d\.)(?P<step>\d+)(?!\.?\d)"  # whole: in epoch_10_loss_2.34 it is 10
SHORTENED = re.compile(r"\d(?:[kKM](?![a-zA-Z])|e\d+(?![a-zA-Z0-9]))")  # 20k, 1e4
GROUPED = re.compile(r"\d,\d{3}(?!\d)")  # 20,500
WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pkl", ".tar")
# What is said of files that only the user's code can load: what they are, a module, a pattern.
OWN_CODE = """{what}. Load them with a function of your own, in my_module.py where the command runs:

{code}

and walk these {kind}s: python -m tracker.pythia --files {files} --load my_module:load --inputs FILE"""
STATE_DICT = """    import torch
    from your_module import GPT, GPTConfig

    def load(path):
        model = GPT(GPTConfig())
        model.load_state_dict(torch.load(path, map_location="cpu")["model"])  # the name under which your program keeps them
        return model"""
ADAPTER = """    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(path):
        base = AutoModelForCausalLM.from_pretrained({base!r})
        return PeftModel.from_pretrained(base, path)"""
# What is said of Lightning checkpoints without the flags that they need.
LIGHTNING = "checkpoints of Lightning need --module package.module:Class, and --tokenizer NAME or --inputs FILE"
REPOSITORY = r"[\w-][\w.-]*/[\w-][\w.-]*"  # ORG/NAME


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its source and its training step."""

    step: int  # within its stage
    source: str  # a repository id, a directory or a file
    revision: str | None  # None for a directory or a file
    tokens: int | None = None  # training tokens so far, if the name states them
    stage: str = ""
    # Of the random initialisation that replaces the weights, for an untrained model
    seed: int | None = None

    def __post_init__(self) -> None:
        if not all(0 <= number < 2**63 for number in (self.step, self.tokens or 0)):
            raise ValueError(
                f"{self.name!r} is read as step {self.step}, and numbers from 0 to 2^63 - 1 can be stored: --revisions takes a "
                "pattern that finds others in it"
            )
        if self.source.encode(errors="ignore").decode() != self.source:
            raise ValueError(
                f"{self.source!r} is not in UTF-8, and a result could not say where it is from: rename it"
            )

    @property
    def name(self) -> str:
        """The name under which it is published: revision, directory or file."""
        return self.revision or Path(self.source).name


@dataclass(frozen=True)
class Suite:
    """A model's checkpoints in order of step."""

    name: str
    source: str
    checkpoints: tuple[Checkpoint, ...]
    cache_dir: Path | None = None  # None: the Hugging Face cache
    default: str = "all"  # the steps walked without --steps
    notice: str = ""  # printed before a walk: how to interpret the steps
    shape: Shape | None = None  # of the model, if it ships with this package
    own_code: bool = False  # whether the user's code loads its files

    @property
    def steps(self) -> tuple[int, ...]:
        """The published steps."""
        return tuple(checkpoint.step for checkpoint in self.checkpoints)

    @property
    def on_hub(self) -> bool:
        """Whether its checkpoints are revisions of a repository on the hub."""
        return self.cache_dir is None and self.checkpoints[0].revision is not None

    def select(self, steps: str | None, scored: Iterable[int] = ()) -> tuple[Checkpoint, ...]:
        """Select checkpoints by steps: paper, all, log2, scores, or numbers such as "128,512".

        Raises:
            ValueError: if a step is not published, or no checkpoint is selected.
        """
        steps = self.default if steps is None else steps
        if steps == "all":
            wanted = set(self.steps)
        elif steps == "paper":
            wanted = set(PAPER_STEPS) & set(self.steps)
        elif steps == "log2":
            wanted = set(_doubling(self.steps))
        elif steps == "scores":
            wanted = set(scored) & set(self.steps)
        else:
            wanted = self._numbers(steps)
        if not wanted:
            raise ValueError(
                f"--steps {steps} selects no checkpoint of {self.name}; published are {join_names(self.steps)}"
            )
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.step in wanted)

    def untrained(self, like: Checkpoint, seed: int) -> Checkpoint:
        """Return a step 0 for the model of a checkpoint: randomly initialised by its class, with this seed.

        Raises:
            ValueError: if step 0 is published.
        """
        if self.steps[0] == 0:
            raise ValueError(
                f"--untrained {seed}: {self.name} has a published step 0; measure it with --steps 0,..."
            )
        return replace(like, step=0, tokens=None if like.tokens is None else 0, seed=seed)

    def _numbers(self, steps: str) -> set[int]:
        try:
            wanted = {int(step) for step in steps.split(",")}
        except ValueError as error:
            raise ValueError(
                f"--steps {steps!r}: give paper, all, log2, scores, or step numbers such as 128,512"
            ) from error
        unpublished = sorted(wanted - set(self.steps))
        if unpublished:
            raise ValueError(
                f"{self.name} has no checkpoint at step {join_names(unpublished)}; published are {join_names(self.steps)}"
            )
        return wanted


def find_suite(
    model: str,
    revisions: str | None = None,
    stage: str | None = None,
    lightning: bool = False,
    notify: Notify = print,
) -> Suite:
    """Find the suite named `model`: nano, a Pythia size (with its variant), a directory, or a repository id.

    Args:
        revisions: a regular expression for the names of checkpoints, with a group `step` and optional groups `tokens` (in
            billions) and `stage`. Default: the family's pattern.
        stage: the stage of a suite trained in several. Default: the first.
        lightning: look for Lightning's `.ckpt` files in a directory.
        notify: receives messages about retries.

    Raises:
        ValueError: if `model` is none of these, a directory has no checkpoints, or the stage does not exist.
        CheckpointError: if the repository does not exist or can't be reached.
    """
    pattern = _pattern(revisions) if revisions else None
    if model == "nano":
        recipe = nano.NanoRecipe()
        checkpoints = tuple(
            Checkpoint(s, nano.REPO, f"step{s}", s * recipe.tokens_per_step) for s in recipe.steps
        )
        return Suite("nano", nano.REPO, checkpoints, nano.cache_dir(recipe=recipe))
    if model and (Path(model).is_dir() or (lightning and Path(model).is_file())):
        return _directory(
            Path(model).resolve(), pattern or re.compile(ANY.revisions), stage, lightning
        )
    pythia = _pythia(model)
    if pythia and not pattern:
        repo = f"EleutherAI/{pythia}"
        checkpoints = tuple(
            Checkpoint(s, repo, f"step{s}", s * PYTHIA_TOKENS_PER_STEP) for s in PYTHIA_STEPS
        )
        return Suite(
            pythia, repo, checkpoints, default="paper", shape=pythia_shapes()[pythia.split("-")[1]]
        )
    if not pythia and Path(model).is_file():
        remedy = "give the directory of a checkpoint, or one of several"
        if model.endswith(".ckpt"):
            remedy = LIGHTNING
        elif model.endswith(WEIGHTS):
            remedy = "--files takes files that a function of yours loads (--load my_module:load)"
        raise ValueError(f"{model} is a file: {remedy}")
    if set("*?[") & set(model):
        raise ValueError(
            f"--model {model!r} is a pattern: --files takes one, with --load my_module:load"
        )
    if pythia or re.fullmatch(REPOSITORY, model):
        return _repository(f"EleutherAI/{pythia}" if pythia else model, pattern, stage, notify)
    if "/" in model or model.startswith("."):
        raise ValueError(
            f"no directory {model}, and it can't be the name of a repository on the hub, ORG/NAME"
        )
    raise ValueError(
        f"no model {model!r}; give nano, a Pythia size ({', '.join(PYTHIA_SIZES)}; with a suffix such as -deduped), a "
        "repository id such as allenai/OLMo-2-0425-1B, or a directory of checkpoints"
    )


def find_files(files: str, revisions: str | None = None, stage: str | None = None) -> Suite:
    """Find the suite of the files or directories that a glob pattern matches, which a function of the user loads.

    Args:
        files: the pattern; `**` matches directories of any depth.
        revisions: as in `find_suite`, for names without the directory that the pattern begins with. Default: the last whole
            number, but of a file's extension.
        stage: as in `find_suite`.

    Raises:
        ValueError: if nothing matches, no name has a step, or two have the same.
    """
    path = Path(os.path.abspath(Path(files).expanduser()))
    # A directory may be called run[1]: what is there is no pattern.
    above = (at for at in path.parents if at.is_dir() or not set("*?[") & set(str(at)))
    root = next(above, path)
    matched = glob(str(Path(escape(str(root))) / path.relative_to(root)), recursive=True)
    found = [path] if os.path.lexists(path) else sorted(map(Path, matched))
    if not found:
        raise ValueError(
            f"--files {files!r}: no file or directory matches it; there is {_content(root)}"
        )
    pattern = _pattern(revisions or LAST_NUMBER)
    names = {file: str(file.relative_to(root)) for file in found}
    if not revisions:
        names = {
            file: name if file.is_dir() else _without_extension(name)
            for file, name in names.items()
        }
    if found == [path]:
        return replace(_single(path, names[path], pattern), own_code=True)
    if not revisions:
        _require_whole_numbers(files, [name for name in names.values() if pattern.search(name)])
    checkpoints = _parse_all(((name, str(file), None) for file, name in names.items()), pattern)
    if not checkpoints:
        raise ValueError(
            f"--files {files!r}: no step in the names of its files, {join_names(names.values())}; --revisions takes a pattern "
            "with a group named step"
        )
    suite = _suite(root.name, str(path), checkpoints, stage)
    shown = (suite.checkpoints[0], suite.checkpoints[-1])
    steps = ", ".join(
        f"{os.path.relpath(c.source, root)} is step {c.step}" for c in dict.fromkeys(shown)
    )
    notices = [suite.notice, f"steps are read from names: {steps}"]
    if others := sorted(
        {str(file) for file in found} - {checkpoint.source for checkpoint in checkpoints}
    ):
        notices.append(
            f"left out, without a step: {join_names(os.path.relpath(file, root) for file in others)}"
        )
    return replace(suite, own_code=True, notice="; ".join(filter(None, notices)))


def _require_whole_numbers(files: str, names: Sequence[str]) -> None:
    """Refuse names whose last whole number is a part of the step: 1,000, or 1k among others without k.

    Raises:
        ValueError: naming them.
    """
    shortened = [name for name in names if SHORTENED.search(name)]
    unclear = [name for name in names if GROUPED.search(name)] or (
        shortened if len(shortened) < len(names) else []
    )
    if unclear:
        raise ValueError(
            f"--files {files!r}: the last whole number of {join_names(unclear)} is a part of the step; give --revisions, a "
            "pattern with a group named step, and leave out names whose step no group of digits states"
        )


def _without_extension(name: str) -> str:
    """Return a name without its extension, which is no number: ckpt.100 has none."""
    path = Path(name)
    return name if path.suffix[1:].isdigit() else str(path.with_suffix(""))


def _content(directory: Path) -> str:
    if not directory.is_dir():
        return f"no directory {directory}"
    return f"{join_names(sorted(file.name for file in directory.iterdir())) or 'nothing'} in {directory}"


def _single(path: Path, name: str, pattern: re.Pattern[str]) -> Suite:
    """Return the suite of one checkpoint, whose name need not state its step."""
    parsed = _parse(name, str(path), None, pattern)
    notice = (
        ""
        if parsed
        else f"the name {path.name} does not state the checkpoint's step: it is shown at step {UNKNOWN}"
    )
    suite = path.stem if path.is_file() else path.name
    return Suite(suite, str(path), (parsed or Checkpoint(UNKNOWN, str(path), None),), notice=notice)


def _pattern(revisions: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(revisions)
    except re.error as error:
        raise ValueError(
            f"--revisions {revisions!r} is not a regular expression ({error})"
        ) from error
    if "step" not in pattern.groupindex:
        raise ValueError(
            f"--revisions {revisions!r} has no group named step; add one, as in ckpt_(?P<step>\\d+)"
        )
    return pattern


def _pythia(model: str) -> str | None:
    """Return the name of a published Pythia model, given by it, by its repository id or by its size and variant."""
    sizes = "|".join(map(re.escape, PYTHIA_SIZES))
    match = re.fullmatch(rf"(EleutherAI/pythia-|(?:pythia-)?)({sizes})(-.*)?", model)
    if match is None:
        return None
    prefix, size, suffix = match[1], match[2], match[3] or ""
    if not suffix or any(
        re.fullmatch(form, suffix) and size in has for form, (_, has) in PYTHIA_VARIANTS.items()
    ):
        return f"pythia-{size}{suffix}"
    if "/" in prefix:
        return None  # a repository like any other, such as EleutherAI/pythia-160m-v0
    variants = ", ".join(f"{name} for {', '.join(has)}" for name, has in PYTHIA_VARIANTS.values())
    raise ValueError(
        f"no model {model!r}: Pythia has {variants}; give any other repository by its whole id, EleutherAI/pythia-..."
    )


def _directory(path: Path, pattern: re.Pattern[str], stage: str | None, lightning: bool) -> Suite:
    if path.is_file() if lightning else (path / "config.json").is_file():
        return _single(path, path.name, pattern)
    children = [path, *sorted(child for child in path.glob("*") if not child.name.startswith("."))]
    directories = [child for child in children if (child / "config.json").is_file()]
    files = _lightning_files(path) if lightning else directories
    checkpoints = _parse_all(((file.name, str(file), None) for file in files), pattern)
    if checkpoints:
        # Directories without a configuration are interrupted copies, which a walk names as it fails on them. One of a step
        # that a complete checkpoint has is another thing, such as its evaluation.
        complete = {(checkpoint.stage, checkpoint.step) for checkpoint in checkpoints}
        copies = (
            ()
            if lightning
            else (c for c in children[1:] if c not in directories and not c.is_file())
        )
        incomplete = _parse_all(((copy.name, str(copy), None) for copy in copies), pattern)
        checkpoints += [
            checkpoint
            for checkpoint in incomplete
            if (checkpoint.stage, checkpoint.step) not in complete
        ]
        return _suite(path.name, str(path), checkpoints, stage)
    if cached := hub.describe_cache(path, "--model"):
        raise ValueError(cached)
    if lightning:
        reason = "no file below it is named like epoch=3-step=1000.ckpt"
        other = "it holds checkpoints of Hugging Face: leave out --module" if directories else ""
    else:
        reason = (
            "neither it nor a subdirectory named like step128 or checkpoint-128 has a config.json"
        )
        files = sorted(file.name for file in _lightning_files(path))
        other = (
            f"it holds {join_names(files)}: {LIGHTNING}" if files else _for_own_code(path, children)
        )
    raise ValueError(
        f"no checkpoints in {path}: {other or f'{reason}; --revisions takes a pattern for other names'}"
    )


def _for_own_code(path: Path, children: Sequence[Path]) -> str:
    """Say how files of a directory are walked that transformers does not load; "" without any."""
    adapters = [child for child in children if (child / "adapter_config.json").is_file()]
    if adapters:
        adapter = read_json(adapters[0] / "adapter_config.json", dict, "restore it")
        base = adapter.get("base_model_name_or_path")
        what = f"{join_names(adapter.name for adapter in adapters)} are adapters (PEFT) of the model {base}"
        files = (
            path
            if adapters == [path]
            else path / f"{os.path.commonprefix([a.name for a in adapters])}*"
        )
        return OWN_CODE.format(
            what=what, kind="adapter", code=ADAPTER.format(base=base), files=quote(str(files))
        )
    weights = [file for file in visible(path) if file.suffix in WEIGHTS]
    if not weights:
        return ""
    suffix = Counter(file.suffix for file in weights).most_common(1)[0][0]
    within = "" if all(file.parent == path for file in weights) else "**/"
    what = f"it holds {counted(len(weights), 'file')} of no known form, {join_names(file.name for file in weights)}"
    return OWN_CODE.format(
        what=what, kind="file", code=STATE_DICT, files=quote(f"{path}/{within}*{suffix}")
    )


def _lightning_files(path: Path) -> list[Path]:
    """List the Lightning checkpoints in a directory and below; of a directory that links lead to again, once."""
    found = [file for file in visible(path) if file.suffix == ".ckpt"]
    return list({(os.path.realpath(file.parent), file.name): file for file in found}.values())


def _repository(
    repo: str, pattern: re.Pattern[str] | None, stage: str | None, notify: Notify
) -> Suite:
    names, _ = hub.list_branches(repo, notify)
    family = next(family for family in FAMILIES if re.fullmatch(family.repositories, repo))
    checkpoints = _parse_all(
        ((name, repo, name) for name in names), pattern or re.compile(family.revisions)
    )
    name = repo.rpartition("/")[2]
    if checkpoints:
        return _suite(name, repo, checkpoints, stage)
    if pattern:
        raise ValueError(
            f"no branch of {repo} matches {pattern.pattern!r}; it has {join_names(sorted(names))}"
        )
    notice = f"{repo} has no branches named by step: its main branch is measured and shown at step {UNKNOWN}"
    return Suite(name, repo, (Checkpoint(UNKNOWN, repo, "main"),), notice=notice)


def _parse_all(
    sources: Iterable[tuple[str, str, str | None]], pattern: re.Pattern[str]
) -> list[Checkpoint]:
    """Return the checkpoints among names, sources and revisions."""
    return [checkpoint for source in sources if (checkpoint := _parse(*source, pattern))]


def _parse(
    name: str, source: str, revision: str | None, pattern: re.Pattern[str]
) -> Checkpoint | None:
    match = pattern.search(name)
    if match is None:
        return None
    groups = {group: value for group, value in match.groupdict().items() if value is not None}
    try:
        step = int(groups["step"])
        tokens = round(float(groups["tokens"]) * 1e9) if "tokens" in groups else None
    except (KeyError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{pattern.pattern!r} finds no numbers in {name!r}: its groups step and tokens must match digits"
        ) from error
    return Checkpoint(step, source, revision, tokens, groups.get("stage", ""))


def _suite(name: str, source: str, checkpoints: list[Checkpoint], stage: str | None) -> Suite:
    """Build the suite of one stage. Steps start from 0 in each stage, so stages can't be joined into one curve."""
    stages = sorted({checkpoint.stage for checkpoint in checkpoints}, key=_natural)
    if stage is not None and stage not in stages:
        available = (
            f"it has {', '.join(stages)}"
            if stages != [""]
            else "the names of its checkpoints have no stage"
        )
        raise ValueError(f"--stage {stage}: no such stage in {name}; {available}")
    selected = stages[0] if stage is None else stage
    notice = ""
    if len(stages) > 1:
        notice = f"{name} was trained in {len(stages)} stages: this is {selected}; --stage takes {', '.join(stages)}"
        name = f"{name}-{selected}"
    ascending = sorted(
        (c for c in checkpoints if c.stage == selected), key=lambda c: (c.step, c.name)
    )
    for a, b in pairwise(ascending):
        if a.step == b.step:
            raise ValueError(
                f"{name}: {a.revision or a.source} and {b.revision or b.source} are both step {a.step}; distinguish them with "
                "--revisions, by a group "
                "(?P<stage>...) or a pattern that matches only one"
            )
    return Suite(name, source, tuple(ascending), notice=notice)


def _natural(name: str) -> list[int | str]:
    """Sort key that compares the digits in a name as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _doubling(steps: tuple[int, ...]) -> list[int]:
    """Select the first step, the first after 0, then repeatedly the published step nearest to twice the previous one."""
    chosen = [step for step in steps if step > 0][:1]
    while later := [step for step in steps if chosen and step > chosen[-1]]:
        chosen.append(min(later, key=lambda step: abs(step - 2 * chosen[-1])))
    return [steps[0], *chosen]
