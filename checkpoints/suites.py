"""Suites of training checkpoints: which steps are published, under which revision, and how many tokens each has seen.

Pythia (Biderman et al. 2023): sizes 14m to 12b, `-deduped` forms of 70m to 12b, `-seed1` to `-seed9` of 14m to 410m;
154 checkpoints each, at steps 0, 1, 2, 4 .. 512 and every 1000 to 143000, of 2,097,152 tokens a step. Any other
repository is asked for its branches, any directory looked through: a name that ends in a step number is a checkpoint.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from checkpoints import hub, nano

PYTHIA_SIZES = ("14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
PYTHIA_DEDUPED = PYTHIA_SIZES[2:]
PYTHIA_SEEDED = PYTHIA_SIZES[:5]
PYTHIA_STEPS = (0, *(2**i for i in range(10)), *range(1000, 144_000, 1000))
PYTHIA_TOKENS_PER_STEP = 2_097_152
PAPER_STEPS = (128, 256, 512, *(1000 * 2**i for i in range(8)), 143_000)  # Fig 1b
PYTHIA_DEFECTS = {  # seen on the hub; EleutherAI/pythia issues 205 and 206
    "2.8b": "86 of its 154 branches on the hub serve final-era weights (0 to 512, every 1000 to 53000, and more): points "
    "of those steps are false",
    "12b": "its branches step50000 and step58000 serve a shard of the final weights: those two points are false",
}
STEP_NAME = re.compile(r"(?:step|checkpoint)[-_]?(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: where its files are, and how far training had come."""

    step: int
    source: str  # a repository id, or a directory
    revision: str | None  # None for a directory
    tokens: int | None = None


@dataclass(frozen=True)
class Suite:
    """A model's checkpoints, ascending in step."""

    name: str
    source: str
    checkpoints: tuple[Checkpoint, ...]
    cache_dir: Path | None = None  # None: the Hugging Face cache
    default: str = "all"  # the steps walked when none are asked for
    notice: str = ""  # what a reader of its curves should know

    @property
    def steps(self) -> tuple[int, ...]:
        """The published steps."""
        return tuple(checkpoint.step for checkpoint in self.checkpoints)

    def chosen(self, steps: str | None, scored: Iterable[int] = ()) -> tuple[Checkpoint, ...]:
        """The checkpoints for a choice of steps: paper, all, log2, scores, or numbers such as "128,512".

        Raises:
            ValueError: for steps that are not published, or a choice that leaves none.
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
                f"--steps {steps} leaves no checkpoint of {self.name}; published are {_listed(self.steps)}"
            )
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.step in wanted)

    def _numbers(self, steps: str) -> set[int]:
        try:
            wanted = {int(step) for step in steps.split(",")}
        except ValueError as error:
            raise ValueError(
                f"--steps {steps!r}; give paper, all, log2, scores, or step numbers such as 128,512"
            ) from error
        absent = sorted(wanted - set(self.steps))
        if absent:
            raise ValueError(
                f"{self.name} has no checkpoint at step {_listed(absent)}; published are {_listed(self.steps)}"
            )
        return wanted


def find_suite(model: str, seed: int = 0) -> Suite:
    """The suite that `model` names: nano, a Pythia size (with -deduped or -seedN), a directory, or a repository id.

    Raises:
        ValueError: for a name that is none of these, or a directory without checkpoints.
    """
    if model == "nano":
        recipe = nano.Recipe()
        checkpoints = tuple(Checkpoint(s, nano.REPO, f"step{s}", s * recipe.tokens_per_step) for s in recipe.steps)
        return Suite("nano", nano.REPO, checkpoints, nano.cache_dir(seed, recipe))
    if model and Path(model).is_dir():
        return _directory(Path(model))
    name = model.removeprefix("EleutherAI/").removeprefix("pythia-")
    size, _, form = name.partition("-")
    if size in PYTHIA_SIZES and "/" not in name:
        _check_pythia_form(model, size, form)
        repo = f"EleutherAI/pythia-{name}"
        checkpoints = tuple(Checkpoint(s, repo, f"step{s}", s * PYTHIA_TOKENS_PER_STEP) for s in PYTHIA_STEPS)
        return Suite(f"pythia-{name}", repo, checkpoints, default="paper", notice=PYTHIA_DEFECTS.get(name, ""))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _repository(model)
    raise ValueError(
        f"no model {model!r}; give nano, a Pythia size ({', '.join(PYTHIA_SIZES)}; -deduped or -seedN after it), "
        "a repository id such as EleutherAI/pythia-70m, or a directory of checkpoints"
    )


def _check_pythia_form(model: str, size: str, form: str) -> None:
    seed = re.fullmatch(r"seed([1-9])", form)
    if form == "" or (form == "deduped" and size in PYTHIA_DEDUPED) or (seed and size in PYTHIA_SEEDED):
        return
    raise ValueError(
        f"no model {model!r}: Pythia has -deduped for {', '.join(PYTHIA_DEDUPED)} and -seed1 to -seed9 for "
        f"{', '.join(PYTHIA_SEEDED)}"
    )


def _directory(path: Path) -> Suite:
    path = path.resolve()
    if (path / "config.json").is_file():
        return Suite(path.name, str(path), (Checkpoint(_step(path.name) or 0, str(path), None),))
    found = [(_step(child.name), child) for child in path.iterdir() if (child / "config.json").is_file()]
    checkpoints = sorted((Checkpoint(s, str(child), None) for s, child in found if s is not None), key=lambda c: c.step)
    if not checkpoints:
        raise ValueError(
            f"no checkpoints in {path}: neither it nor a subdirectory named like step128 or checkpoint-128 has a config.json"
        )
    return Suite(path.name, str(path), _distinct(path.name, checkpoints))


def _repository(repo: str) -> Suite:
    branches = [(_step(branch), branch) for branch in hub.branches(repo)]
    checkpoints = sorted((Checkpoint(s, repo, b) for s, b in branches if s is not None), key=lambda c: c.step)
    if not checkpoints:
        notice = f"{repo} has no branches named by step: its main branch is measured, and stands at step 0"
        return Suite(repo.rpartition("/")[2], repo, (Checkpoint(0, repo, "main"),), notice=notice)
    return Suite(repo.rpartition("/")[2], repo, _distinct(repo, checkpoints))


def _distinct(name: str, checkpoints: list[Checkpoint]) -> tuple[Checkpoint, ...]:
    """The checkpoints, if no two claim the same step."""
    for a, b in pairwise(checkpoints):
        if a.step == b.step:
            raise ValueError(
                f"{name}: {a.revision or a.source} and {b.revision or b.source} are both step {a.step}; such a suite "
                "(several stages) can't be walked yet: put the checkpoints to compare into a directory"
            )
    return tuple(checkpoints)


def _step(name: str) -> int | None:
    match = STEP_NAME.search(name)
    return int(match[1]) if match else None


def _doubling(steps: tuple[int, ...]) -> list[int]:
    """From the first step after 0, always the published step nearest to twice the last; with the first and the last."""
    chosen = [step for step in steps if step > 0][:1]
    while later := [step for step in steps if chosen and step > chosen[-1]]:
        chosen.append(min(later, key=lambda step: abs(step - 2 * chosen[-1])))
    return [steps[0], *chosen]


def _listed(steps: Iterable[int]) -> str:
    listed = [str(step) for step in steps]
    return ", ".join(listed if len(listed) <= 16 else [*listed[:13], "…", *listed[-2:]])
