"""Prompt sets: the one that ships with the package, those of the hub, and a user's own files."""

import hashlib
import json
from pathlib import Path

from tracker.openllm import SETS, hub_prompts

BUILTIN = Path(__file__).parent / "data" / "prompts.txt"


def load_prompts(source: str) -> list[str]:
    r"""The prompts of a set: "builtin", "openllm", "wikitext", or a file.

    A text file holds one prompt a line, in which \n stands for a line break; a `.jsonl` file one JSON object a line
    with the prompt under "prompt". Blank lines are left out.

    Raises:
        ValueError: if the file is not there, holds no prompt, or a line of it is not as described; if a set of the hub
            can't be fetched.
    """
    if source in SETS:
        return hub_prompts(source)
    file = BUILTIN if source == "builtin" else Path(source)
    if not file.is_file():
        raise ValueError(
            f"no prompt file {source!r}; give 'builtin', 'openllm', 'wikitext', a text file with one prompt a line, or a "
            ".jsonl file"
        )
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not lines:
        raise ValueError(f"{source} holds no prompts: every line is blank")
    if file.suffix == ".jsonl":
        return [_from_json(line, i, source) for i, line in enumerate(lines, 1)]
    return [line.replace("\\n", "\n") for line in lines]


def prompts_digest(prompts: list[str]) -> str:
    """A hash that tells prompt sets apart."""
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]


def _from_json(line: str, i: int, source: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'line {i} of {source} is not a JSON object with "prompt": {line[:60]!r}') from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"line {i} of {source}: the prompt is empty or not a string")
    return prompt
