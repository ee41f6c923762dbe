"""Tests of prompts from the hub's benchmarks, with the real datasets client and a local server."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from tests.conftest import ROOT
from tests.support.hub_server import serve
from tracker.walk import prompts
from tracker.walk.prompts import load_prompts

FIRST = {  # of each set: a row as published, and the prompt made of it
    "allenai/ai2_arc": (
        {
            "id": "1",
            "question": "Which is a solid?",
            "choices": {"text": ["ice"], "label": ["A"]},
            "answerKey": "A",
        },
        "Question: Which is a solid?\nAnswer:",
    ),
    "openai/gsm8k": ({"question": "1 + 1?", "answer": "2\n#### 2"}, "Question: 1 + 1?\nAnswer:"),
    "Rowan/hellaswag": (
        {
            "activity_label": "Baking",
            "ctx_a": "[title] A cook.",
            "ctx_b": "she",
            "endings": ["x"],
            "label": "0",
        },
        "Baking:. A cook. She",
    ),
    "cais/mmlu": (
        {"question": "Where? ", "subject": "law", "choices": ["a", "b", "c", "d"], "answer": 1},
        "Where?\nA. a\nB. b\nC. c\nD. d\nAnswer:",
    ),
    "truthfulqa/truthful_qa": ({"question": "Is it so?", "best_answer": "No."}, "Q: Is it so?\nA:"),
    "allenai/winogrande": (
        {"sentence": "The cup fell, so _ broke.", "option1": "a", "option2": "b", "answer": "1"},
        "The cup fell, so",
    ),
    "furonghuang-lab/Easy2Hard-Bench": (
        {"question": "2 + 2?", "answer": "4", "rating": 0.25},
        None,
    ),
    "Salesforce/wikitext": ({"text": " = A heading = \n"}, None),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    for source in (*prompts.OPENLLM, *prompts.EASY2HARD, *prompts.WIKITEXT):
        row, _ = FIRST[source.repository]
        rows = [row] + (
            [{"text": f"{i} " + "word " * prompts.PARAGRAPH} for i in range(300)]
            if "text" in row
            else []
        )
        repository = root / f"datasets--{source.repository.replace('/', '--')}"
        snapshot = repository / "snapshots" / "c0ffee"
        folder = source.config or "data"
        (snapshot / folder).mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("c0ffee")
        pd.DataFrame(rows).to_parquet(snapshot / folder / f"{source.split}-00000-of-00001.parquet")
        config = {"config_name": source.config or "default"}
        files = [{"split": source.split, "path": f"{folder}/{source.split}-*"}]
        (snapshot / "README.md").write_text(
            f"---\nconfigs: {json.dumps([config | {'data_files': files}])}\n---\n"
        )
    with serve(root) as hub:
        yield hub


def load_in_process(*names: str, directory, **environment: str) -> subprocess.CompletedProcess:
    """Load sets in a separate process, since the client reads its endpoint on import; it prints a line for each."""
    settings = {
        **os.environ,
        "HF_HOME": str(directory / "home"),
        "TRACKER_CACHE": str(directory / "ours"),
    }
    code = (
        "import json, sys; from tracker.walk.prompts import load_prompts\n"
        "for name in sys.argv[1:]: print(json.dumps(load_prompts(name)))"
    )
    command = [sys.executable, "-c", code, *names]
    return subprocess.run(
        command, cwd=ROOT, env=settings | environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_prompts_are_fetched_formatted_drawn_and_cached(served, tmp_path):
    process = load_in_process(
        "openllm", "easy2hard", "wikitext", directory=tmp_path, **served.environment
    )
    assert process.returncode == 0, process.stderr
    openllm, easy2hard, wikitext = map(json.loads, process.stdout.splitlines())
    assert openllm == [[text, None, source] for source, (_, text) in FIRST.items() if text]
    # With its difficulty
    assert easy2hard == [["Question: 2 + 2?\nAnswer:", 0.25, "furonghuang-lab/Easy2Hard-Bench"]]
    assert len({text for text, *_ in wikitext}) == 100
    assert all(len(text.split()) > prompts.PARAGRAPH for text, *_ in wikitext)
    assert len(served.requested(r"GET /datasets/.*parquet")) == len(FIRST)
    again = load_in_process("wikitext", directory=tmp_path / "another", **served.environment)
    assert json.loads(again.stdout) == wikitext, "the same hundred paragraphs"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "nothing")}
    cached = load_in_process("openllm", "easy2hard", "wikitext", directory=tmp_path, **offline)
    assert cached.stdout == process.stdout


def test_missing_network_is_reported_in_one_sentence(tmp_path):
    process = load_in_process("openllm", directory=tmp_path, HF_HUB_OFFLINE="1")
    last = process.stderr.strip().splitlines()[-1]
    assert process.returncode == 1 and last.startswith(
        "ValueError: --prompts openllm: allenai/ai2_arc can't be fetched"
    )
    assert "go online once" in last and not (tmp_path / "ours").exists()


def test_missing_package_is_reported_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets"):
        load_prompts("wikitext")
