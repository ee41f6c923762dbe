"""Prompt sets: the built-in one, a user's files, and those of the hub: the six benchmarks of the Open LLM Leaderboard, two of
their own, and WikiText-2.

The paper draws prompts from the test sets of ARC, GSM8K, HellaSwag, MMLU, TruthfulQA and Winogrande (section 4.2; 1,200 in
Fig. 5), from GSM8K alone (Fig. 15), from Easy2Hard-Bench, whose questions are rated by difficulty (Fig. 9; of its six parts,
rated on scales of their own, we take GSM8K's), and 100 from WikiText-2 (Fig. 26), and prints no format. These are the
zero-shot forms of the leaderboard's own harness: what a model reads before it answers. Sets whose test answers are secret
give their validation split.

A set is drawn once, by a fixed seed, and kept: later runs need no network, and measure the same prompts.
"""

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tracker.common.files import cache_root, read_json, write_atomic
from tracker.common.text import first_line

SEED = 0
VERSION = 1  # of formats and sampling: raised when a set comes to mean other prompts
PARAGRAPH = 40  # words: what is shorter in WikiText is a heading or a fragment
CHOICES = "ABCD"

Row = Mapping[str, Any]


class Prompt(NamedTuple):
    """What a model reads, how hard it is, where somebody has rated that, and the benchmark or file it was drawn from."""

    text: str
    difficulty: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class PromptSource:
    """Rows of a data set on the hub, and what becomes of one."""

    repository: str
    config: str | None
    split: str
    prompt: Callable[[Row], str]
    count: int
    wanted: Callable[[Row], bool] = lambda row: True
    difficulty: Callable[[Row], float | None] = lambda row: None


def _multiple_choice(row: Row) -> str:
    options = "".join(
        f"{letter}. {choice}\n" for letter, choice in zip(CHOICES, row["choices"], strict=True)
    )
    return f"{row['question'].strip()}\n{options}Answer:"


def _question(row: Row) -> str:
    return f"Question: {row['question']}\nAnswer:"


def _activity(row: Row) -> str:
    text = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return re.sub(r"\[.*?\]", "", text.replace(" [title]", ". ")).replace("  ", " ").strip()


OPENLLM = (
    PromptSource("allenai/ai2_arc", "ARC-Challenge", "test", _question, 200),
    PromptSource("openai/gsm8k", "main", "test", _question, 200),
    PromptSource("Rowan/hellaswag", None, "validation", _activity, 200),
    PromptSource("cais/mmlu", "all", "test", _multiple_choice, 200),
    PromptSource(
        "truthfulqa/truthful_qa",
        "generation",
        "validation",
        lambda row: f"Q: {row['question']}\nA:",
        200,
    ),
    PromptSource(
        "allenai/winogrande",
        "winogrande_xl",
        "validation",
        lambda row: row["sentence"].split("_")[0].strip(),
        200,
    ),
)
WIKITEXT = (
    PromptSource(
        "Salesforce/wikitext",
        "wikitext-2-raw-v1",
        "test",
        lambda row: row["text"].strip(),
        100,
        lambda row: len(row["text"].split()) >= PARAGRAPH,
    ),
)
GSM8K = (OPENLLM[1],)
EASY2HARD = (
    PromptSource(
        "furonghuang-lab/Easy2Hard-Bench",
        "E2H-GSM8K",
        "eval",
        _question,
        200,
        difficulty=lambda row: row["rating"],
    ),
)
SETS = {"openllm": OPENLLM, "gsm8k": GSM8K, "easy2hard": EASY2HARD, "wikitext": WIKITEXT}


def hub_prompts(name: str) -> list[Prompt]:
    """Return the prompts of a set, from the cache or drawn anew.

    Raises:
        ValueError: if a data set can't be fetched, or the package that does it is not installed.
    """
    file = cache_root() / "prompts" / f"{name}-v{VERSION}.json"
    try:
        kept = read_json(file, dict)
        return [
            Prompt(*prompt)
            for prompt in zip(kept["prompts"], kept["difficulty"], kept["source"], strict=True)
        ]
    except (OSError, ValueError, KeyError):
        pass  # not drawn yet, or not readable: draw it
    prompts = [prompt for source in SETS[name] for prompt in _drawn(name, source)]
    texts, difficulty, sources = zip(*prompts, strict=True)
    content = {"prompts": texts, "difficulty": difficulty, "source": sources, "seed": SEED}
    write_atomic(file, json.dumps(content).encode())
    return prompts


def _drawn(name: str, source: PromptSource) -> list[Prompt]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"--prompts {name} needs the package datasets: pip install datasets"
        ) from error
    from datasets.exceptions import DatasetNotFoundError

    try:
        rows: Any = datasets.load_dataset(source.repository, source.config, split=source.split)
    except (DatasetNotFoundError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--prompts {name}: {source.repository} can't be fetched ({first_line(error)}); go online once, or give a "
            "file of prompts"
        ) from error
    try:
        wanted = [
            Prompt(source.prompt(row), source.difficulty(row), source.repository)
            for row in rows
            if source.wanted(row)
        ]
    except KeyError as error:
        raise ValueError(
            f"--prompts {name}: rows of {source.repository} have no {error} any more; give a file"
        ) from error
    candidates = [prompt for prompt in wanted if prompt.text]
    # The seed is part of what the name of a set stands for: all walks measure the same prompts.
    return random.Random(SEED).sample(candidates, min(source.count, len(candidates)))


BUILTIN = Path(__file__).parent / "data" / "prompts.txt"


def prompts() -> list[str]:
    """Return the built-in prompts, which a walk measures by default: sixteen short English texts.

    With them as `probe=` of a callback or `inputs` of `tracker.measure`, and the model's tokenizer, a training run is measured
    on what a walk over its checkpoints measures.

    >>> len(prompts())
    16
    """
    return [prompt.text for prompt in load_prompts("builtin")]


def load_prompts(source: str) -> list[Prompt]:
    r"""Load the prompts of a set: "builtin", one of the hub's (`SETS`), or a file.

    A text file holds one prompt a line, in which \n stands for a line break; a `.jsonl` file one JSON object a line
    with the prompt under "prompt" and, where it is known for all, a number under "difficulty" and what it was drawn from under
    "source" (default: the file). Blank lines are left out, and so is a byte-order mark. A line ends at a line feed, and nowhere
    else.

    Raises:
        ValueError: if the file is not there, holds no prompt, or a line of it is not as described; if a set of the hub
            can't be fetched.
    """
    if source in SETS:
        return hub_prompts(source)
    file = BUILTIN if source == "builtin" else Path(source)
    if not file.is_file():
        raise ValueError(
            f"no prompt file {source!r}; give 'builtin', {', '.join(map(repr, SETS))}, a text file with one prompt a line, or a "
            ".jsonl file"
        )
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    # Not `splitlines`, which ends lines at characters that prompts may contain, such as U+2028.
    every = [line.removesuffix("\r") for line in text.split("\n")]
    lines = {i: line for i, line in enumerate(every, 1) if line.strip()}
    if not lines:
        raise ValueError(f"{source} holds no prompts: every line is blank")
    name = "builtin" if source == "builtin" else file.name
    if file.suffix == ".jsonl":
        prompts = {i: _from_json(line, i, source) for i, line in lines.items()}
        for key in ("difficulty", "source"):
            lacking = [i for i, prompt in prompts.items() if getattr(prompt, key) is None]
            if lacking and len(lacking) < len(prompts):
                raise ValueError(
                    f'{source}: line {lacking[0]} has no "{key}", and others have; give it for all or for none'
                )
        return [
            prompt if prompt.source else prompt._replace(source=name) for prompt in prompts.values()
        ]
    return [
        Prompt(_storable(line.replace("\\n", "\n"), i, source), source=name)
        for i, line in lines.items()
    ]


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash of a prompt set: of the texts, difficulties and sources."""
    return hashlib.sha256(json.dumps(list(map(list, prompts))).encode()).hexdigest()[:16]


def _from_json(line: str, i: int, source: str) -> Prompt:
    try:
        entry = json.loads(line)
        prompt = entry["prompt"]
        difficulty = entry.get("difficulty")
        drawn_from = entry.get("source")
    # Of numbers and of nesting, json has limits.
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'line {i} of {source} is not a JSON object with "prompt": {line[:60]!r}'
        ) from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"line {i} of {source}: the prompt is empty or not a string")
    if difficulty is not None and not _is_finite(difficulty):
        raise ValueError(
            f"line {i} of {source}: difficulty {repr(difficulty)[:60]} is not a number, or too large"
        )
    if drawn_from is not None and (not isinstance(drawn_from, str) or not drawn_from):
        raise ValueError(
            f"line {i} of {source}: source {drawn_from!r} is no name; give a string, such as a benchmark's"
        )
    return Prompt(_storable(prompt, i, source), difficulty, drawn_from)


def _is_finite(number: object) -> bool:
    # bool is an int; an int may be too large for a float.
    try:
        return type(number) in (int, float) and math.isfinite(number)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _storable(prompt: str, i: int, source: str) -> str:
    """Return a prompt that a file of results can hold.

    Raises:
        ValueError: naming the character that it can't.
    """
    if character := next(
        (char for char in prompt if char == "\0" or "\ud800" <= char <= "\udfff"), ""
    ):
        raise ValueError(
            f"line {i} of {source}: a file of results can't hold the character U+{ord(character):04X}; leave it out"
        )
    return prompt
