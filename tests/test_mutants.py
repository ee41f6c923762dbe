"""What `make mutants` changes, what it leaves alone, and which lines a test must reach."""

from tests.mutants.made import mutants

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
