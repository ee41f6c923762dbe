"""The tutorial runs from its first cell to its last, on the tiny suite."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

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
    own = {"HF_HUB_CACHE": str(suite), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Of tqdm, where Jupyter's widgets are not installed
    own["PYTHONWARNINGS"] = "ignore:IProgress not found"
    resources = {"metadata": {"path": str(out.parent)}}
    client = NotebookClient(notebook, timeout=300, coalesce_streams=True, resources=resources)
    client.execute(env=os.environ | own)
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
    assert (out / "report.html").exists()
    assert f"{out}/report.html" in str(outputs(notebook)[-1].data)


def test_what_is_committed_is_small_and_was_run():
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    assert FILE.stat().st_size < 500_000
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == 5
    assert "error" not in {output.output_type for output in outputs(notebook)}
    assert "/home/" not in FILE.read_text() and "/tmp/" not in FILE.read_text()
