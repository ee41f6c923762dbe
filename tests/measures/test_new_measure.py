"""A measure that is declared in one file is seen wherever results are: with one that the product lacks."""

import json
import subprocess
import sys

PROGRAM = """
import json
from tracker.measures import trajectory
from tracker.measures.declaration import BLOCK, POSITION

for name, dims, compute in (
    ("toy_length", BLOCK, lambda X: trajectory.norms(trajectory.steps(X))),
    ("toy_reach", POSITION, lambda X: trajectory.norms(X[-1:] - X[:1])[0]),
):
    for shown in (False, True):
        trajectory.DECLARED += trajectory._of_states(
            f"{name}_{shown}", dims, f"label of {name}_{shown}", normed=False, compute=compute, main=True,
            text="What it is.", formula="f", reference="r", charts=("training",), headline=shown, summary=shown,
        )

import tempfile
from pathlib import Path
import numpy as np
import tracker
from tests.support.models import neox, tokens
from tests.support.stores import stored
from tracker.analysis.curves import headlines
from tracker.loggers.protocol import Row, select_metrics
from tracker.report.write import write_report

ds = tracker.measure(neox(), tokens(3), k=2)
folder = tempfile.mkdtemp()
store = stored(Path(folder) / "run", {0: ds, 8: ds}, model="toy")
write_report(store.path, f"{folder}/page.html")
page = open(f"{folder}/page.html").read()
by_walks = select_metrics(Row.from_unit(ds.assign_coords(step=0)), "main").scalars
table, found = tracker.summary(store.path), {}
for name in (str(name) for name in ds.data_vars if str(name).startswith("toy_")):
    metric = f"trajectory/{name}/median"
    rows = table.loc[name] if name in table.index.get_level_values(0) else None
    found[name] = {
        "Dataset": ds[name].attrs["long_name"] == f"label of {name}",
        "undefined values": name in ds.quantity.values,
        "curves": name in tracker.curves(ds),
        "all logs": metric in tracker.scalars(ds),
        "page": name in page,
        "log of walks": metric in by_walks,
        "default log": metric in headlines(ds),
        "summary": rows is not None and bool(np.allclose(rows.value, ds[name].median()) and (rows.low < rows.high).all()),
    }
print(json.dumps(found))
"""
OF_DECLARATION = ("default log", "summary")


def test_a_declared_measure_is_seen_everywhere():
    """In another process, since the registry is built when it is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    for name, seen in found.items():
        shown = name.endswith("True")
        assert seen == {place: shown or place not in OF_DECLARATION for place in seen}, name
