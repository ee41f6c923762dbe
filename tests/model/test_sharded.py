"""Two ranks measure a sharded model: errors on one rank end the measurement on both, and neither waits for the other."""

import json

import pytest

from tests.model.sharded_ranks import SETTINGS, make, measure
from tests.support.ranks import run_on_two_ranks

pytestmark = pytest.mark.slow  # two processes, ten cases
BUDGET = SETTINGS.memory_budget


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of the cases on each rank."""
    directory = tmp_path_factory.mktemp("ranks")
    run_on_two_ranks("tests.model.sharded_ranks", directory)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def whole():
    """Results of the model before it is sharded."""
    return measure(make())


# The beginning of what is raised, or none; and the number of attempts, each with half of the memory
CASES = {
    "nothing": ("", 1),
    "nothing, again": ("", 1),
    "memory": ("", 2),
    "memory of a gather": ("", 2),
    "memory, always": ("OutOfMemoryError: DefaultCPUAllocator: can't allocate memory", 3),
    "before a gather": ("RuntimeError: ValueError: planted", 1),
    "error": ("RuntimeError: planted", 1),
    "not finite": ("FloatingPointError: planted", 1),
    "after the last gather": ("RuntimeError: ValueError: planted", 1),
    "another path": (
        "RuntimeError: the ranks do not read the same weights in the same order, so none can read any",
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_find_or_raise_the_same(ranks, whole, case):
    message, attempts = CASES[case]
    for results in ranks:
        found = results[case]["found"]
        assert found.startswith(message) if message else found == pytest.approx(whole, rel=1e-10)
        assert results[case]["budgets"] == [BUDGET >> i for i in range(attempts)]


def test_a_mistake_in_the_code_keeps_its_type(ranks):
    assert ranks[1]["mistake"]["found"] == "TypeError: planted"
    assert ranks[0]["mistake"]["found"] == "RuntimeError: TypeError: planted"
