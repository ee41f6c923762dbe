"""The walk's built-in prompts as the probe of a training, and as what is measured."""

import tokenizers
from transformers import PreTrainedTokenizerFast

import tracker
from tests.support.models import neox
from tests.support.units import assert_same_units
from tracker.walk.prompts import load_prompts


def test_they_are_those_of_a_walk():
    assert tracker.prompts() == [prompt.text for prompt in load_prompts("builtin")]
    assert len(set(tracker.prompts())) == 16


def test_a_training_measures_them_as_tracker_measure_does():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.train_from_iterator(
        tracker.prompts(), tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]"])
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    model = neox(vocab_size=len(tokenizer))
    measured = tracker.measure(model, tracker.prompts(), tokenizer=tokenizer, k=2)
    assert list(measured.prompt_text.values) == tracker.prompts()
    assert measured.miscoupling.notnull().all()
    watched = tracker.Watch(1, k=2, probe=tracker.prompts(), tokenizer=tokenizer)(0, model)
    assert_same_units(watched, measured.assign_coords(step=0))
