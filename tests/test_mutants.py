"""What `make mutants` changes, what it leaves alone, which lines a test must reach, and that no excuse is outdated."""

import re
from pathlib import Path

import pytest

from tests.mutants import known
from tests.mutants.__main__ import stages
from tests.mutants.made import mutants

DEFINED = re.compile(r"(?:def|class) (\w+)|(\w+)[^=\n(]* = ")
SOURCE = """
LIMIT = 3
SMALL = 64

def f(x: int = 1):
    if LIMIT < x.sum(dim=-1) and len(x) > SMALL:
        raise ValueError(f"{x + 1}")
    return -x.mT @ x[2.0:]
"""


def test_mutants_of_a_few_lines(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(SOURCE)
    made = mutants(str(file))
    assert {text: (line, sorted(reached)) for text, (line, reached, _) in made.items()} == {
        ": LIMIT = 3 -> LIMIT = 4": (2, [6]),
        "f: x: int=1 -> x: int=2": (5, [5, 6, 7, 8]),
        "f: LIMIT < x.sum(dim=-1) and len(x) > SMALL -> LIMIT < x.sum(dim=-1) or len(x) > SMALL": (
            6,
            [6],
        ),
        "f: LIMIT < x.sum(dim=-1) -> LIMIT <= x.sum(dim=-1)": (6, [6]),
        "f: LIMIT < x.sum(dim=-1) -> LIMIT >= x.sum(dim=-1)": (6, [6]),
        "f: x.sum -> x.mean": (6, [6]),
        "f: x.sum(dim=-1) -> x.sum(dim=-2)": (6, [6]),
        "f: -x.mT @ x[2.0:] -> x[2.0:] @ -x.mT": (8, [8]),
        "f: -x.mT @ x[2.0:] -> x.mT @ x[2.0:]": (8, [8]),
        "f: -x.mT @ x[2.0:] -> -x @ x[2.0:]": (8, [8]),
        "f: x[2.0:] -> x[4.0:]": (8, [8]),
    }
    codes = [compiled() for _, _, compiled in made.values()]
    assert len({*codes, compile(SOURCE, str(file), "exec")}) == len(made) + 1


@pytest.mark.parametrize("file", known.KNOWN)
def test_excuses_are_of_mutants_that_are_made(file):
    assert known.KNOWN[file].keys() <= mutants(file).keys()


def test_what_is_left_alone_exists():
    product = "\n".join(Path(file).read_text() for file in (*known.FILES, *known.LEFT_OUT))
    defined = {name for names in re.findall(DEFINED, product) for name in names}
    assert defined >= {*known.NAMES, *known.SPEED}
    assert {*known.KEYWORDS} <= {*re.findall(r"(\w+)=", product)}


@pytest.mark.parametrize(
    "file, whose, test",
    [
        ("tracker/linalg/svd.py", "its own", "linalg/test_svd_on_accelerator.py"),
        ("tracker/linalg/svd.py", "its package's", "linalg/test_krylov.py"),
        ("vit/data.py", "other", "test_measure.py"),
    ],
)
def test_which_tests_are_run_first(file, whose, test):
    assert file in known.FILES and Path("tests", test) in stages(file)[whose]
