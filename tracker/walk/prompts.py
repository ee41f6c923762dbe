"""Prompt sets: the built-in one, those of the hub, and a user's files."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from tracker.walk.openllm import SETS, Prompt, hub_prompts

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
    r"""Load the prompts of a set: "builtin", one of the hub's (`openllm.SETS`), or a file.

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
        raise ValueError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start})") from error
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
        return [prompt if prompt.source else prompt._replace(source=name) for prompt in prompts.values()]
    return [Prompt(_storable(line.replace("\\n", "\n"), i, source), source=name) for i, line in lines.items()]


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash of a prompt set: of the texts, difficulties and sources."""
    return hashlib.sha256(json.dumps(list(map(list, prompts))).encode()).hexdigest()[:16]


def _from_json(line: str, i: int, source: str) -> Prompt:
    try:
        entry = json.loads(line)
        prompt, difficulty, drawn_from = entry["prompt"], entry.get("difficulty"), entry.get("source")
    except (
        ValueError,
        RecursionError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # numbers and nesting have limits
        raise ValueError(f'line {i} of {source} is not a JSON object with "prompt": {line[:60]!r}') from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"line {i} of {source}: the prompt is empty or not a string")
    if difficulty is not None and not _is_finite(difficulty):
        raise ValueError(f"line {i} of {source}: difficulty {repr(difficulty)[:60]} is not a number, or too large")
    if drawn_from is not None and (not isinstance(drawn_from, str) or not drawn_from):
        raise ValueError(
            f"line {i} of {source}: source {drawn_from!r} is no name; give a string, such as a benchmark's"
        )
    return Prompt(_storable(prompt, i, source), difficulty, drawn_from)


def _is_finite(number: object) -> bool:
    try:
        return type(number) in (int, float) and math.isfinite(number)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _storable(prompt: str, i: int, source: str) -> str:
    """Return a prompt that a file of results can hold.

    Raises:
        ValueError: naming the character that it can't.
    """
    if found := next((char for char in prompt if char == "\0" or "\ud800" <= char <= "\udfff"), ""):
        raise ValueError(
            f"line {i} of {source}: a file of results can't hold the character U+{ord(found):04X}; leave it out"
        )
    return prompt
