"""A tokenizer of a dozen words, and prompts of them."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer():
    words = {word: i for i, word in enumerate("the of a cat dog sat on mat . and".split())}
    plain = Tokenizer(models.WordLevel(words, unk_token="the"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="the")


PROMPTS = ["the cat sat on the mat .", "a dog", "the mat of the cat and the dog"]
