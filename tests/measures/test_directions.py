"""Words for singular directions: the final norm, the tokenizer, texts in files, models without an unembedding."""

import numpy as np
import pytest

import tracker
from tests.models import Letters, build, images, timm_vit
from tests.stores import stored
from tracker.common.errors import UsageError
from tracker.measures import directions

MEASURES = ["coupling", "directions"]


def test_words_are_the_tokenizer_s():
    model, _ = build("gpt_neox")
    texts = ["abc", "abcde"]

    ds = tracker.measure(model, texts, tokenizer=Letters(), k=2, tokens="all", measures=MEASURES)
    assert ds.direction_out_words.values[0, 0, 0, 0].startswith("#")
    assert (ds.direction_out_words.values[0, 3:] == "").all() and (
        ds.direction_out_words.values[1, 3:] != ""
    ).all()
    named = tracker.measure(
        model, texts, tokenizer=Letters(lambda ids: f" w{ids[0]}"), k=2, measures=MEASURES
    )
    assert named.direction_in_words.values[1, 0, 2, 1] == ds.direction_in_words.values[
        1, 4, 2, 1
    ].replace("#", "w")
    assert named.sizes["direction"] == 2 and named.direction_random_words.values[
        0, 0, 0
    ].startswith("w")


def test_words_with_characters_that_files_do_not_take():
    decode = {0: " a\x00b", 1: "\n", 2: " ", 3: "é"}.__getitem__
    ids = np.array([[[0, 1, 2, 3]]])
    words = directions.in_words({"direction_out_words": ids}, lambda token: decode(token[0]))[
        "direction_out_words"
    ]
    assert words.tolist() == [["a\\x00b, '\\n', ' ', é"]]


def test_models_without_an_unembedding():
    assert "direction_out_words" not in tracker.measure(timm_vit(), images(), k=4, measures="all")
    with pytest.raises(UsageError, match="measures='directions', but no unembedding"):
        tracker.measure(timm_vit(), images(), k=4, measures=MEASURES)


def test_a_stored_unit_keeps_the_words(tmp_path):
    model, inputs = build("gpt_neox")
    ds = tracker.measure(model, inputs, k=2, measures=MEASURES)
    store = stored(tmp_path / "run", {1: ds})
    np.testing.assert_array_equal(
        store.read(1).direction_out_words.values, ds.direction_out_words.values
    )
