"""Tests of reading prompt files and of their errors."""

import json

import pytest

import tracker
from tracker.walk.prompts import SETS, Prompt, load_prompts, prompts_digest


def load(text, path):
    path.write_text(text)
    return load_prompts(str(path))


def test_text_and_json_lines_are_read(tmp_path):
    lines = [Prompt("one", source="p.txt"), Prompt("two\nlines", source="p.txt")]
    assert load("one\n\ntwo\\nlines\n", tmp_path / "p.txt") == lines
    plain, rated = '{"prompt": "one"}\n', '{"prompt": "one", "difficulty": 3, "source": "arc"}\n'
    assert load(plain, tmp_path / "p.jsonl") == [Prompt("one", source="p.jsonl")]
    assert load(rated, tmp_path / "p.jsonl") == [Prompt("one", 3, "arc")]
    builtin = load_prompts("builtin")
    assert {prompt.source for prompt in builtin} == {"builtin"}
    assert tracker.prompts() == [prompt.text for prompt in builtin]
    assert len(set(tracker.prompts())) == 16


@pytest.mark.parametrize("space", ["\u2028", "\u2029", "\x85", "\f", "\v", "\x1c"])
def test_prompts_are_read_as_written(space, tmp_path):
    (tmp_path / "p.txt").write_bytes(f"\ufefffirst{space}line\r\n\nsecond\r{space}\n".encode())
    texts = [prompt.text for prompt in load_prompts(str(tmp_path / "p.txt"))]
    assert texts == [f"first{space}line", f"second\r{space}"]
    entries = [{"prompt": f"first{space}line"}, {"prompt": "second"}]
    (tmp_path / "p.jsonl").write_text(
        "\ufeff" + "\n\n".join(json.dumps(e, ensure_ascii=False) for e in entries)
    )
    assert [prompt.text for prompt in load_prompts(str(tmp_path / "p.jsonl"))] == [
        f"first{space}line",
        "second",
    ]


def test_what_a_file_of_results_can_not_hold_is_refused_at_once(tmp_path):
    with pytest.raises(
        ValueError, match=r"line 3 of .*p.txt: a file of results can't hold the character U\+0000"
    ):
        load("one\n\nt\0wo", tmp_path / "p.txt")
    with pytest.raises(ValueError, match=r"line 1 of .*p.jsonl: .* U\+D800"):
        load('{"prompt": "\\ud800"}', tmp_path / "p.jsonl")


def test_digest_depends_on_texts_difficulties_and_sources():
    sets = [
        [Prompt("a")],
        [Prompt("b")],
        [Prompt("a", 1)],
        [Prompt("a", 2.0)],
        [Prompt("a"), Prompt("b")],
    ]
    sets += [[Prompt("a b", source="1.0")], [Prompt("a b 1.0")], [Prompt("a", 2.0, "arc")]]
    sets += [
        [Prompt("a b", 1.0)],
        [Prompt("a b"), Prompt("1.0")],
        [Prompt("a b\x001.0")],
        [Prompt("a", source="arc")],
    ]
    assert len({prompts_digest(prompts) for prompts in sets}) == len(sets)


@pytest.mark.parametrize(
    "line, message",
    [
        ("[]", "line 1 of .* is not a JSON object"),
        ('{"text": "a"}', "line 1 of .* is not a JSON object"),
        ('{"prompt": " "}', "the prompt is empty"),
        ('{"prompt": "a", "difficulty": "hard"}', "difficulty 'hard' is not a number"),
        ('{"prompt": "a", "difficulty": NaN}', "difficulty nan is not a number"),
        (
            '{"prompt": "a", "difficulty": 1}\n{"prompt": "b"}',
            'line 2 has no "difficulty", and others have',
        ),
        (
            '{"prompt": "a", "source": "arc"}\n{"prompt": "b"}',
            'line 2 has no "source", and others have',
        ),
        ('{"prompt": "a", "source": 3}', "source 3 is no name"),
        ('\n\n{"prompt": " "}', "line 3 of .*: the prompt is empty"),
        (
            '{"prompt": "a", "difficulty": 1' + 400 * "0" + "}",
            "difficulty 1000+ is not a number, or too large",
        ),
        ('{"prompt": "a", "difficulty": 1' + 5000 * "0" + "}", "line 1 of .* is not a JSON object"),
        ('{"prompt": ' + 100_000 * "[" + "}", "line 1 of .* is not a JSON object"),
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
