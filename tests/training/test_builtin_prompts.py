"""The walk's built-in prompts as the probe of a training run, and as what is measured."""

import lightning
import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import tracker
from tests.lightning_runs import trainer
from tests.models import neox
from tests.training.test_callback import assert_same_units
from tracker.walk.prompts import load_prompts


def test_they_are_those_of_a_walk():
    assert tracker.prompts() == [prompt.text for prompt in load_prompts("builtin")]
    assert len(set(tracker.prompts())) == 16


@pytest.fixture(scope="module")
def tokenizer():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.train_from_iterator(
        tracker.prompts(), tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


class LanguageModel(lightning.LightningModule):
    def __init__(self, vocabulary):
        super().__init__()
        self.model = neox(vocab_size=vocabulary)

    def forward(self, input_ids):
        return self.model(input_ids)

    def training_step(self, batch, index):
        return self.model(*batch).logits.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


@pytest.mark.slow
def test_a_callback_and_a_loop_measure_them_as_tracker_measure_does(tokenizer):
    module, units = LanguageModel(len(tokenizer)), {}
    callback = tracker.CouplingCallback(
        2,
        k=2,
        probe=tracker.prompts(),
        tokenizer=tokenizer,
        on_measure=lambda unit: units.update({int(unit.step): unit}),
    )
    rows = torch.utils.data.TensorDataset(torch.randint(1, len(tokenizer), (4, 6)))
    trainer([callback], max_steps=2).fit(module, torch.utils.data.DataLoader(rows, 2))
    measured = tracker.measure(module.model, tracker.prompts(), tokenizer=tokenizer, k=2)
    assert (
        list(measured.prompt_text.values) == tracker.prompts()
        and measured.miscoupling.notnull().all()
    )
    assert list(units) == [0, 2]
    assert_same_units(units[2], measured.assign_coords(step=2))
    watched = tracker.Watch(1, k=2, probe=tracker.prompts(), tokenizer=tokenizer)(0, module.model)
    assert_same_units(watched, measured.assign_coords(step=0))
