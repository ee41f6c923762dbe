"""Links, headings, packages, commands and options that the documents name exist."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import xarray as xr

import tracker
from tests.conftest import ROOT
from tracker.measures.declaration import COORDINATES
from tracker.measures.registry import BY_NAME

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"python -m ([\w.]+)((?:[^`\n#|;&]|\\\n)*)")
HISTORY = [ROOT / "CHANGELOG.md"]  # commands as they were at the time
VARIABLES = {
    *BY_NAME,
    *COORDINATES,
    *(f"{name}_null" for name, measure in BY_NAME.items() if measure.null),
}


def path(document: Path) -> str:
    return str(document.relative_to(ROOT))


@cache
def text(document: Path) -> str:
    return document.read_text()


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text(document)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=path)
def test_links_lead_somewhere(document):
    for link in LINK.findall(FENCED.sub("", text(document))):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https" and "." in parts.netloc, link
            continue
        target = (document.parent / parts.path).resolve() if parts.path else document
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not parts.fragment or parts.fragment in anchors(target), link


def first_cells(head: str) -> list[list[str]]:
    """Return the names in the first cell of each row of a table of the design."""
    rows = rf"^\| {head} \|.*\n\|.*\n((?:\|.*\n)*)"
    (table,) = re.findall(rows, text(ROOT / "docs" / "design.md"), re.MULTILINE)
    return [re.findall(r"`([\w.]+)`", row.split("|")[1]) for row in table.splitlines()]


def test_the_table_names_every_package_and_top_level_directory():
    public = [
        entry for entry in ROOT.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    ]
    top_level = {entry.name for entry in public if [*entry.glob("*.py"), *entry.glob("*.md")]}
    subpackages = {
        f"tracker.{init.parent.name}" for init in (ROOT / "tracker").glob("*/__init__.py")
    }
    assert sorted(sum(first_cells("package"), [])) == sorted(top_level | subpackages)


@pytest.mark.parametrize(
    "document", [document for document in DOCUMENTS if document not in HISTORY], ids=path
)
def test_the_files_that_a_document_names_exist(document):
    files = re.findall(
        r"`((?:tracker|checkpoints|vit|benchmarks|tests|examples|docs)/[\w./-]*)`", text(document)
    )
    assert [file for file in files if not (ROOT / file).exists()] == []


def named_variables(words: str) -> set[str]:
    """Return the names in a text that can only be variables: `miscoupling_normed`, `ds.lss`, `null_level(ds, "offdiag")`."""
    code = set(re.findall(r"`([a-z]\w*)`", words))
    variants = {
        name
        for name in code
        if any(name == measure or name.startswith(f"{measure}_") for measure in BY_NAME)
        or name.endswith(("_raw", "_normed", "_null"))
    }
    read = set(re.findall(r"\b(?:ds|results|curves\(\w+\))\.(\w+)", words))
    with_levels = set(re.findall(r"null_(?:level|spread)\([^\n\"]*\"(\w+)\"", words))
    return variants | {name for name in read if not hasattr(xr.Dataset, name)} | with_levels


@pytest.mark.parametrize("document", [of for of in DOCUMENTS if of not in HISTORY], ids=path)
def test_the_variables_that_a_document_names_exist(document):
    wrong = 'null_level(ds, "offdiag_other")'
    assert named_variables(f"{text(document)}\n{wrong}") - VARIABLES == {"offdiag_other"}


def test_the_design_lists_the_layers_of_the_import_contract():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (
        of["layers"] for of in settings["contracts"] if of.get("containers") == ["tracker"]
    )
    listed = [" | ".join(names) for names in first_cells("layer")]
    assert listed == layers


def test_the_design_finds_names_where_they_are():
    placed = re.findall(r"`(?:\w+\.)?(\w+)` in `([\w/.]+\.py)`", text(ROOT / "docs" / "design.md"))
    missing = [
        (name, file)
        for name, file in placed
        if not re.search(rf"\b{name}\b", (ROOT / file).read_text())
    ]
    assert len(placed) > 20 and missing == []


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """Return every `python -m MODULE` that the documents tell a reader to run, with its options."""
    found = {
        (module.rstrip("."), tuple(re.findall(r"(?<!\S)(--[\w-]+)", arguments)))
        for document in DOCUMENTS
        if document not in HISTORY
        for module, arguments in COMMAND.findall(text(document))
    }
    assert ("tracker.pythia", ("--model", "--wandb")) in found
    return sorted(found)


@cache
def usage(module: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module, options", commands(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_commands_exist_and_know_their_options(module, options):
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert not spec.submodule_search_locations or importlib.util.find_spec(f"{module}.__main__")
    unknown = [option for option in options if not re.search(rf"(?<!\S){option}\b", usage(module))]
    assert unknown == []


@pytest.mark.filterwarnings(
    "ignore:block 1 .* measured over the full sequence", "ignore:this is a language model"
)
def test_the_examples_of_what_a_block_is_run(capsys):
    names = {}
    for example in PYTHON.findall(text(ROOT / "docs" / "blocks.md")):
        exec(example, names)
    assert capsys.readouterr().out.endswith("\noutput of wte\n")


def test_public_names_are_listed():
    names = [name for name in dir(tracker) if not name.startswith("_")]
    assert {"summary", "measure", "Watch", "report"} <= set(names) and "importlib" not in names
    assert all(hasattr(tracker, name) for name in names)
