"""Tests of reading prompt files and of their errors."""

import pytest

from tracker.walk.openllm import SETS, Prompt
from tracker.walk.prompts import load_prompts, prompts_digest


def load(text, path):
    path.write_text(text)
    return load_prompts(str(path))


def test_text_and_json_lines_are_read(tmp_path):
    lines = [Prompt("one", source="p.txt"), Prompt("two\nlines", source="p.txt")]
    assert load("one\n\ntwo\\nlines\n", tmp_path / "p.txt") == lines
    plain, rated = '{"prompt": "one"}\n', '{"prompt": "one", "difficulty": 3, "source": "arc"}\n'
    assert load(plain, tmp_path / "p.jsonl") == [Prompt("one", source="p.jsonl")]
    assert load(rated, tmp_path / "p.jsonl") == [Prompt("one", 3, "arc")]
    assert {prompt.source for prompt in load_prompts("builtin")} == {"builtin"}


def test_digest_depends_on_texts_and_difficulties():
    assert prompts_digest([Prompt("a", source="arc")]) == prompts_digest([Prompt("a")]), "stores of before go on"
    sets = [[Prompt("a")], [Prompt("b")], [Prompt("a", 1)], [Prompt("a", 2.0)], [Prompt("a"), Prompt("b")]]
    assert len({prompts_digest(prompts) for prompts in sets}) == len(sets)


@pytest.mark.parametrize(
    "line, message",
    [
        ("[]", "line 1 of .* is not a JSON object"),
        ('{"text": "a"}', "line 1 of .* is not a JSON object"),
        ('{"prompt": " "}', "the prompt is empty"),
        ('{"prompt": "a", "difficulty": "hard"}', "difficulty 'hard' is not a number"),
        ('{"prompt": "a", "difficulty": NaN}', "difficulty nan is not a number"),
        ('{"prompt": "a", "difficulty": 1}\n{"prompt": "b"}', 'line 2 has no "difficulty", and others have'),
        ('{"prompt": "a", "source": "arc"}\n{"prompt": "b"}', 'line 2 has no "source", and others have'),
        ('{"prompt": "a", "source": 3}', "source 3 is no name"),
    ],
)
def test_bad_lines_are_reported(line, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(line, tmp_path / "p.jsonl")


def test_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give 'builtin', " + ", ".join(map(repr, SETS))):
        load_prompts("nothing")
    with pytest.raises(ValueError, match="holds no prompts"):
        load("\n \n", tmp_path / "p.txt")
