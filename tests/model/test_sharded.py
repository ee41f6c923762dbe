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


@pytest.mark.parametrize("case", ["nothing", "nothing, again"])
def test_ranks_measure_what_one_process_does(ranks, whole, case):
    for results in ranks:
        assert results[case] == {"found": pytest.approx(whole, rel=1e-10), "budgets": [BUDGET]}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("before a gather", "RuntimeError: ValueError: planted"),
        ("error", "RuntimeError: planted"),
        ("not finite", "FloatingPointError: planted"),
        ("after the last gather", "RuntimeError: ValueError: planted"),
        (
            "another path",
            "RuntimeError: the ranks do not read the same weights in the same order, so none can read any",
        ),
    ],
)
def test_an_error_on_one_rank_is_raised_on_both(ranks, case, message):
    for results in ranks:
        assert results[case] == {"found": message, "budgets": [BUDGET]}


@pytest.mark.parametrize("case", ["memory", "memory of a gather"])
def test_both_ranks_try_again_with_less_memory(ranks, whole, case):
    for results in ranks:
        assert results[case] == {
            "found": pytest.approx(whole, rel=1e-10),
            "budgets": [BUDGET, BUDGET // 2],
        }


def test_both_ranks_give_up_together(ranks):
    for results in ranks:
        assert results["memory, always"]["found"].startswith(
            "OutOfMemoryError: DefaultCPUAllocator: can't allocate memory"
        )
        assert results["memory, always"]["budgets"] == [BUDGET, BUDGET // 2, BUDGET // 4]


def test_a_mistake_in_the_code_keeps_its_type(ranks):
    assert ranks[1]["mistake"]["found"] == "TypeError: planted"
    assert ranks[0]["mistake"]["found"] == "RuntimeError: TypeError: planted"
