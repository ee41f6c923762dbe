"""`python -m tests.size`: count what git tracks of the product and of the tests, and fail above the limits of pyproject.toml.

Counted are Python's tokens: names, operators, numbers and texts, without docstrings and comments. A data file below tests/ is
counted as if the same table were written in Python, so that moving cases to a file does not change the number.
"""

import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

PARTS = {
    "product": ("tracker", "vit", "checkpoints", "benchmarks", "examples"),
    "tests": ("tests",),
}
DATA = (".csv", ".json", ".jsonl", ".toml", ".txt", ".yaml", ".yml")
# From Python 3.12 on, an f-string is several tokens, which are counted as one, at its end.
COUNTED = ("NAME", "OP", "NUMBER", "STRING", "FSTRING_END")
NESTED = {"FSTRING_START": 1, "FSTRING_END": -1}
# A quoted text, a word or number, or another sign
OF_DATA = re.compile(r'"[^"\n]*"|[\w.]+|[^\w\s]')


def main(root: Path) -> int:
    """Print what is counted; return the exit status, 1 if a number is above its limit."""
    limits, status = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["size"], 0
    for part, directories in PARTS.items():
        counted, allowed = count(root, directories), limits[part]
        said = f"{part} ({', '.join(directories)}): {counted:,} Python tokens of {allowed:,} that pyproject.toml allows"
        if counted > allowed:
            status = 1
            said += (
                ": remove what this change made unnecessary, or raise the number under [tool.size] with a line in "
                "docs/decisions.md that says for what"
            )
        print(said)
    return status


def count(root: Path, directories: tuple[str, ...]) -> int:
    """Return the tokens of the programs, and of the tests' data, that are tracked below the directories."""
    command = ["git", "ls-files", "-z", *directories]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    total = 0
    for file in filter(Path.is_file, (root / name for name in listed.split("\0"))):
        if file.suffix == ".py":
            total += tokens_of_python(file)
        elif file.suffix in DATA and "tests" in directories:
            total += len(OF_DATA.findall(file.read_text()))
    return total


def tokens_of_python(file: Path) -> int:
    """Return the tokens of a program without the texts that are statements of their own, such as docstrings."""
    with file.open("rb") as opened:
        names = [tokenize.tok_name[token.type] for token in tokenize.tokenize(opened.readline)]
    names = [name for name in names if name not in ("COMMENT", "NL")]
    total = nested = 0
    for before, name, after in zip(names, names[1:], names[2:], strict=False):
        nested += NESTED.get(name, 0)
        alone = (name, after) == ("STRING", "NEWLINE") and before not in COUNTED
        total += name in COUNTED and not nested and not alone
    return total


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
