"""Names, steps and scores of the published suites."""

import pytest

from checkpoints import nano, scores
from checkpoints.suites import PAPER_STEPS, PYTHIA_STEPS, find_suite


def test_pythia_publishes_154_checkpoints():
    suite = find_suite("12b")
    assert suite.source == "EleutherAI/pythia-12b" and suite.name == "pythia-12b"
    assert len(suite.steps) == len(set(suite.steps)) == 154 and suite.steps[-1] == 143_000
    assert suite.checkpoints[-1].revision == "step143000"
    assert suite.checkpoints[-1].tokens == 143_000 * 2_097_152  # 299.9 billion


@pytest.mark.parametrize("name", ["70m-deduped", "pythia-70m-deduped", "EleutherAI/pythia-70m-deduped"])
def test_one_suite_by_several_names(name):
    assert find_suite(name).source == "EleutherAI/pythia-70m-deduped"


@pytest.mark.parametrize("name", ["14m-deduped", "1b-seed1", "410m-seed0", "410m-seed10", "12b-final"])
def test_forms_that_were_not_published(name):
    with pytest.raises(ValueError, match="-seed1 to -seed9"):
        find_suite(name)


def test_choices_of_steps():
    suite = find_suite("6.9b")
    chosen = {choice: [c.step for c in suite.chosen(choice)] for choice in ("paper", "all", "log2", "128,143000")}
    assert chosen["paper"] == list(PAPER_STEPS) == [c.step for c in suite.chosen(None)]
    assert chosen["paper"] == [128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000]
    assert chosen["all"] == list(PYTHIA_STEPS) and chosen["128,143000"] == [128, 143_000]
    assert chosen["log2"] == [0, 1, 2, 4, 8, 16, 32, 64, *PAPER_STEPS]
    scored = [c.step for c in suite.chosen("scores", scores.published("pythia-6.9b"))]
    assert len(scored) == 27 and scored[:3] == [0, 1, 2] and 143_000 in scored
    assert [c.step for c in find_suite("nano").chosen(None)] == list(nano.STEPS)


def test_scores_are_joined_exactly():
    twelve = scores.published("pythia-12b")
    # From the table itself: pythia-12b, zero-shot, 143000, arc_easy, acc.
    assert twelve[143_000]["arc_easy"] == 0.702441 and 2000 not in twelve
    tasks = [value for task, value in twelve[143_000].items() if task != scores.MEAN]
    assert twelve[143_000][scores.MEAN] == pytest.approx(sum(tasks) / len(tasks))
    assert scores.published("pythia-1b")[143_000]  # spelled pythia-1b-bf16 in the table
    assert scores.published("pythia-14m") == {} == scores.published("nano")


def test_nano_is_the_same_for_a_seed(suite, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path))
    from tests.conftest import TINY

    assert not nano.is_trained(recipe=TINY)
    again = nano.train(recipe=TINY)
    assert nano.is_trained(recipe=TINY) and not nano.is_trained(seed=1, recipe=TINY)
    for step in TINY.steps:
        commits = [(nano._repository(path) / "refs" / f"step{step}").read_text() for path in (suite, again)]
        assert commits[0] == commits[1]
    other = nano.train(seed=1, recipe=TINY)
    assert (nano._repository(other) / "refs" / "step0").read_text() != commits[0]


def test_nano_has_pythias_switches():
    config = nano.build(nano.Recipe()).config
    assert config.use_parallel_residual and not config.tie_word_embeddings
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    assert (config.num_hidden_layers, config.hidden_size) == (6, 128)
