"""What the documents point to is there: links, headings, files of the tree, commands and their options."""

import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"python -m ([\w.]+)((?:[^`\n#|;&]|\\\n)*)")
HISTORY = ("CHANGELOG.md", "log.md")  # commands as they were at the time


@cache
def text(document: Path) -> str:
    return document.read_text()


def anchors(document: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text(document)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in LINK.findall(FENCED.sub("", text(document))):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https" and "." in parts.netloc, link
            continue
        target = (document.parent / parts.path).resolve() if parts.path else document
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not parts.fragment or parts.fragment in anchors(target), link


def test_the_anchors_of_a_document(tmp_path):
    document = tmp_path / "a.md"
    document.write_text("# What it *costs*, `k=10`\n```\n# no heading\n```\n## Beside these: more\n")
    assert anchors(document) == {"what-it-costs-k10", "beside-these-more"}


def tree() -> dict[str, str]:
    """The lines under each directory of the README's tree."""
    (block,) = re.findall(r"^## The tree\n\n```\n(.*?)^```", text(ROOT / "README.md"), re.MULTILINE | re.DOTALL)
    parts = re.split(r"^(\w+)/", block, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_files_of_the_tree_are_there():
    named = [(directory, name) for directory, lines in tree().items() for name in re.findall(r"[\w/]+\.\w+\b", lines)]
    files = [(directory, name) for directory, name in named if name.endswith((".py", ".md", ".toml", ".ipynb"))]
    assert len(files) > 60
    assert [pair for pair in files if not Path(ROOT, *pair).is_file()] == []


@pytest.mark.parametrize("directory", ["tracker", "checkpoints", "docs"])
def test_the_tree_names_every_file(directory):
    files = {file.name for file in (ROOT / directory).iterdir() if file.suffix in (".py", ".md")}
    assert {name for name in files - {"__init__.py", "__main__.py"} if name not in tree()[directory]} == set()


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """Every `python -m MODULE` that a reader is told to run, with its options."""
    found = {
        (module.rstrip("."), tuple(re.findall(r"(?<!\S)(--[\w-]+)", arguments)))
        for document in DOCUMENTS
        if document.name not in HISTORY
        for module, arguments in COMMAND.findall(text(document))
    }
    return sorted(found)


@cache
def usage(module: str) -> str:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module, options", commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_commands_are_there_and_know_their_options(module, options):
    assert importlib.util.find_spec(module) is not None
    unknown = [option for option in options if not re.search(rf"(?<!\S){option}\b", usage(module))]
    assert unknown == [] or module == "pytest"


def test_commands_are_found():
    found = dict.fromkeys(module for module, _ in commands())
    assert {"tracker.pythia", "tracker.figures", "tracker.dashboards", "vit.grid", "benchmarks.coupling"} <= set(found)
    assert ("tracker.pythia", ("--model", "--steps")) in commands()
