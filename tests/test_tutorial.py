"""The tutorial runs from its first cell to its last, on the tiny suite."""

import os

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import tracker
from tests.conftest import ROOT

FILE = ROOT / "examples" / "tutorial.ipynb"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(suite, tmp_path_factory):
    """The notebook, run with other parameters; the directory of its walk."""
    notebook, out = nbformat.read(FILE, as_version=4), tmp_path_factory.mktemp("tutorial") / "walk"
    (parameters,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())
    ]
    parameters.source = (
        "from checkpoints import nano\n"
        "from checkpoints.fetch import cached_snapshot\n"
        "from checkpoints.load import load\n"
        f"untrained_model, tokenizer = load(cached_snapshot(nano.REPO, 'step0', {str(suite)!r}))\n"
        f"trained_model, _ = load(cached_snapshot(nano.REPO, 'step8', {str(suite)!r}))\n"
        f"model_name, last, walked, out = 'block-coupling/nano', 8, '0,8', {str(out)!r}"
    )
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(suite),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    # Of tqdm, where Jupyter's widgets are not installed
    environment["PYTHONWARNINGS"] = "ignore:IProgress not found"
    NotebookClient(
        notebook,
        timeout=300,
        coalesce_streams=True,
        resources={"metadata": {"path": str(out.parent)}},
    ).execute(env=environment)
    return notebook, out


def outputs(notebook):
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def test_every_figure_is_drawn_and_the_page_is_there(executed):
    notebook, out = executed
    drawn = [cell for cell in notebook.cells if "tracker.plot(" in cell.source]
    assert len(drawn) == 5
    for cell in drawn:
        (shown,) = [output.data for output in cell.outputs if "data" in output]
        assert "image/png" in shown, cell.source
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    assert (out / "report.html").exists() and f"{out}/report.html" in str(
        outputs(notebook)[-1].data
    )


def test_the_walk_repeats_what_was_measured_by_hand(executed):
    """The numbers that the notebook prints, computed from what its walk has stored."""
    notebook, out = executed
    (printed,) = [
        cell.outputs[0].text for cell in notebook.cells if "tracker.summary(" in cell.source
    ]
    lines = iter(printed.splitlines())
    rows = [
        next(line for line in lines if f" {name} " in line) for name in ("untrained", "trained")
    ]  # of the first measure
    stored = tracker.open_results(out)
    values = stored.miscoupling.isel(k=0).mean(("prompt", "token")).values
    off = ~np.eye(values.shape[-1], dtype=bool)
    for row, value in zip(rows, values, strict=True):
        assert (
            row.split(" trained ")[-1].split(" untrained ")[-1].split()[0]
            == f"{value[off].mean():.3f}"
        )


def test_what_is_committed_is_small_and_was_run():
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    assert FILE.stat().st_size < 500_000
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == 5
    assert not [output for output in outputs(notebook) if output.output_type in ("error",)]
    assert "/home/" not in FILE.read_text() and "/tmp/" not in FILE.read_text()
