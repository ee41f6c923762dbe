"""Text encoders are measured at the last word, not at [SEP], and have the class token that their tokenizer puts first."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

import tracker
from tests.support.refused import refused
from tracker import pythia
from tracker.training.probe import forward_calls

pytestmark = pytest.mark.filterwarnings(
    "ignore:the state enters the blocks", "ignore:.*measured over the full sequence"
)

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] </s> the cat sat on mat a dog".split()
SIZE = dict(
    vocab_size=len(WORDS),
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=32,
)
PROMPTS = ["the cat sat on the mat", "a dog"]
ENCODERS = ("Bert", "Roberta", "ModernBert")
DECODERS = {
    "GPT2": dict(n_embd=16, n_layer=3, n_head=2),
    "GPTNeoX": SIZE,
}


def tokenizer(
    template: str = "[CLS] $A [SEP]", **special: str
) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of words; `special` names its special tokens in addition to [UNK]."""
    plain = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = [(word, i) for i, word in enumerate(WORDS) if word in template.split()]
    plain.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", **special
    )


def of_bert() -> transformers.PreTrainedTokenizerFast:
    return tokenizer(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", pad_token="[PAD]")


def hugging_face(family: str, **config) -> nn.Module:
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(WORDS),
        "pad_token_id": None if family in DECODERS else 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    settings |= DECODERS.get(family, SIZE) | config
    cls = getattr(transformers, f"{family}Model")
    return cls(cls.config_class(**settings)).eval()


def measured(model, inputs, tokenizer=None, tokens=None, **options):
    return tracker.measure(
        model, inputs, tokenizer=tokenizer, tokens=tokens, k=2, dtype="float64", **options
    )


def at(ds) -> list[int]:
    return ds.token_position.values[:, 0].astype(int).tolist()


def texts(ds) -> list[str]:
    return [str(ds.token_text.values[prompt, position]) for prompt, position in enumerate(at(ds))]


# The last token.


@pytest.mark.parametrize("family", ENCODERS)
def test_text_encoders_are_measured_at_the_last_word_or_their_class_token(family):
    model = hugging_face(family)
    ds = measured(model, PROMPTS, of_bert())
    assert texts(ds) == ["mat", "dog"] and ds.attrs["tokens"] == "last non-special"
    same = measured(model, PROMPTS, of_bert(), [-2])
    np.testing.assert_array_equal(ds.miscoupling, same.miscoupling)
    very_last = measured(model, PROMPTS, of_bert(), [-1])
    assert texts(very_last) == ["[SEP]", "[SEP]"] and very_last.attrs["tokens"] == "last"
    assert not np.array_equal(ds.singular_value, very_last.singular_value)
    of_class = measured(model, PROMPTS, of_bert(), "cls")
    assert texts(of_class) == ["[CLS]", "[CLS]"] and of_class.attrs["tokens"] == "cls"
    first = measured(model, PROMPTS, of_bert(), [0])
    np.testing.assert_array_equal(of_class.miscoupling, first.miscoupling)


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_keep_their_last_token_whatever_it_is(family):
    for template, special in (
        ("$A </s>", dict(eos_token="</s>")),
        ("[CLS] $A [SEP]", dict(sep_token="[SEP]")),
    ):
        ds = measured(hugging_face(family), PROMPTS, tokenizer(template, **special))
        assert texts(ds) == [template.split()[-1]] * 2 and ds.attrs["tokens"] == "last"


def test_an_encoder_that_ends_texts_with_an_end_token_alone():
    model = transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2
        )
    )
    assert texts(measured(model.eval(), PROMPTS, tokenizer("$A </s>", eos_token="</s>"))) == [
        "mat",
        "dog",
    ]


def test_other_special_tokens_and_prompts_of_special_tokens_alone_are_kept():
    """A mask stands for a word; a cut prompt has no [SEP]; a prompt has at least one token."""
    model = hugging_face("Bert")
    assert texts(measured(model, ["the [MASK]", "the cat [SEP]"], of_bert())) == ["[MASK]", "cat"]
    assert texts(measured(model, "[CLS]", of_bert())) == ["[SEP]"]
    with pytest.warns(UserWarning, match="cut to its first 3"):
        ds = measured(model, PROMPTS[::-1], of_bert(), max_tokens=3)
    assert texts(ds) == ["dog", "cat"]
    with pytest.warns(UserWarning, match="cut to its first 4"):
        ds = measured(model, PROMPTS, of_bert(), max_tokens=4)
    assert texts(ds) == ["sat", "dog"] and ds.attrs["tokens"] == "last non-special"


def test_ids_with_padding_are_read_with_the_config():
    """RoBERTa's config states its end token, BERT's states none; a sample without special tokens ends where it ends."""
    ids = torch.tensor([[2, 6, 7, 8, 3], [2, 6, 3, 0, 0], [2, 6, 7, 8, 9]])
    padded = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    ds = measured(hugging_face("Roberta", eos_token_id=3, pad_token_id=0), padded)
    assert at(ds) == [3, 1, 4] and ds.attrs["tokens"] == "last non-special"
    ds = measured(hugging_face("Bert", pad_token_id=0), padded, of_bert())
    assert at(ds) == [3, 1, 4] and ds.attrs["tokens"] == "last non-special"
    (call,) = forward_calls(hugging_face("Bert"), padded, of_bert())
    assert call.special.ends == {2, 3}, "also in a training"
    ds = measured(hugging_face("Bert", pad_token_id=0), padded)
    assert at(ds) == [4, 2, 4] and ds.attrs["tokens"] == "last"


# The class token.


NO_CLASS_TOKEN = {
    "tokenizer": (PROMPTS, "[CLS] $A [SEP]", {}, "the tokenizer has no class token"),
    "prompt": (
        PROMPTS,
        "$A [SEP]",
        {"cls_token": "[CLS]"},
        "prompt 0 begins with token 6, not with the class token, 2.*choose 'last', 'all' or indices",
    ),
    "no ids": ({"inputs_embeds": torch.ones(1, 2, 8)}, "$A", {}, "the model has no class token"),
}


@pytest.mark.parametrize("case", NO_CLASS_TOKEN)
def test_what_has_no_class_token_is_refused(case):
    inputs, template, special, message = NO_CLASS_TOKEN[case]
    with refused(message):
        measured(hugging_face("Bert"), inputs, tokenizer(template, **special), "cls")


def test_the_class_token_that_a_config_states():
    model = hugging_face("ModernBert", cls_token_id=2)
    assert at(measured(model, torch.tensor([[2, 7, 8], [2, 8, 6]]), tokens="cls")) == [0, 0]
    padded = {"input_ids": torch.tensor([[0, 2, 7]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    assert at(measured(model, padded, tokens="cls")) == [1]
    with refused("sample 1 begins with token 9, not with the class token, 2"):
        measured(model, torch.tensor([[2, 7, 8], [9, 8, 6]]), tokens="cls")


# Stores.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:If you want to use")
def test_a_walk_measures_the_last_word(tmp_path, capsys):
    for saved in (transformers.BertLMHeadModel(transformers.BertConfig(**SIZE)), of_bert()):
        saved.save_pretrained(tmp_path / "run" / "step1")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    options = "--k 2 --wandb off --device cpu --measures coupling --steps 1"
    flags = (
        f"--model {tmp_path}/run --prompts {tmp_path}/prompts.txt --out {tmp_path}/new {options}"
    )
    assert pythia.main(flags.split()) == 0
    ds = tracker.open_results(tmp_path / "new")
    assert ds.attrs["tokens"] == "last non-special"
    assert ds.token_position.values.ravel().tolist() == [6, 2]
    printed = capsys.readouterr().out
    assert "last token, in text encoders the last word; cpu" in printed
    assert "run: 2 prompts, K = 2, last word\n" in printed
