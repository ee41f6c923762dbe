"""Words for singular directions: against the derivative of the logits, scores of known unembeddings, texts."""

import numpy as np
import pytest
import torch

import tracker
from tests.models import Letters, build, images, timm_vit
from tests.stores import stored
from tracker.common.errors import UsageError
from tracker.measures import directions

MEASURES = ["coupling", "directions"]


class Known(directions.LastStates):
    """A head that maps a state of d = 8 to 8 logits of its own entries."""

    def __init__(self):
        pass

    def logits(self, directions):
        return directions


def test_scores_of_known_directions():
    """A unit vector stands for one word; its score is that of one entry among zeros."""
    found = directions._scores(Known().logits, torch.eye(8).double()[None, :3], 100)
    expected = (1 - 1 / 8) / np.sqrt(1 / 8 - 1 / 64)
    torch.testing.assert_close(found["score"][0, :, 0], torch.full((3,), expected).double())
    assert found["ids"][0, :, 0, 0].tolist() == [0, 1, 2]
    whole = directions._scores(Known().logits, torch.eye(8).double()[None], 10**9)
    torch.testing.assert_close(whole["score"][:, :3], found["score"])


@pytest.mark.parametrize("seed", range(3))
def test_the_joint_sign_of_a_pair_and_scales_do_not_matter(seed):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(2, 1, 4, 8, generator=generator, dtype=torch.float64)
    for of in X:
        plus, minus = (directions._scores(Known().logits, 3 * s * of, 100) for s in (1, -1))
        torch.testing.assert_close(plus["score"], minus["score"].flip(-1))
        torch.testing.assert_close(plus["score"], directions._scores(Known().logits, of, 100)["score"])


def test_words_are_the_tokenizer_s():
    model, _ = build("gpt_neox")
    texts = ["abc", "abcde"]

    ds = tracker.measure(model, texts, tokenizer=Letters(), k=2, tokens="all", measures=MEASURES)
    assert ds.direction_out_words.values[0, 0, 0, 0].startswith("#")
    assert (ds.direction_out_words.values[0, 3:] == "").all() and (ds.direction_out_words.values[1, 3:] != "").all()
    named = tracker.measure(model, texts, tokenizer=Letters(lambda ids: f" w{ids[0]}"), k=2, measures=MEASURES)
    assert named.direction_in_words.values[1, 0, 2, 1] == ds.direction_in_words.values[1, 4, 2, 1].replace("#", "w")
    assert named.sizes["direction"] == 2 and named.direction_random_words.values[0, 0, 0].startswith("w")


def test_words_with_characters_that_files_do_not_take():
    decode = {0: " a\x00b", 1: "\n", 2: " ", 3: "é"}.__getitem__
    ids = np.array([[[0, 1, 2, 3]]])
    words = directions.in_words({"direction_out_words": ids}, lambda token: decode(token[0]))["direction_out_words"]
    assert words.tolist() == [["a\\x00b, '\\n', ' ', é"]]


def test_models_without_an_unembedding():
    assert "direction_out_words" not in tracker.measure(timm_vit(), images(), k=4, measures="all")
    with pytest.raises(UsageError, match="measures='directions', but no unembedding"):
        tracker.measure(timm_vit(), images(), k=4, measures=MEASURES)


def test_a_stored_unit_keeps_the_words(tmp_path):
    model, inputs = build("gpt_neox")
    ds = tracker.measure(model, inputs, k=2, measures=MEASURES)
    store = stored(tmp_path / "run", {1: ds})
    np.testing.assert_array_equal(store.read(1).direction_out_words.values, ds.direction_out_words.values)
