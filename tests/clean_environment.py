"""Use the installed distribution alone, without extras: `make package` runs this in an environment that holds only the wheel.

A plain PyTorch model is measured and its results are stored and opened; each part that needs an extra names it.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import tracker
from tracker.common.errors import DISTRIBUTION, EXTRAS

CALLBACKS = {"CouplingCallback": "train", "TransformersCallback": "walk"}
COMMANDS = {
    "tracker.pythia --model 70m": "all",
    "tracker.report results": "all",
    "tracker.figures all results": "all",
    "vit.train": "all",
}


def main():
    """Check what works without extras, and what each missing one says."""
    torch.manual_seed(0)
    installed = {name for name in EXTRAS if importlib.util.find_spec(name)}
    assert not installed, f"not a clean environment: {installed}"
    blocks = (
        nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True) for _ in range(3)
    )
    model = nn.Sequential(nn.Embedding(50, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 50))
    ids = torch.randint(50, (2, 9))
    ds = tracker.measure(model, ids, k=4)
    assert ds.miscoupling.shape == (2, 1, 1, 3, 3)
    with tempfile.TemporaryDirectory() as directory:
        ds.to_netcdf(Path(directory) / "one.nc", engine="netcdf4")
        with tracker.Watch(1, probe=ids, k=4, save_dir=directory + "/run") as watch:
            watch(0, model)
        assert tracker.open_results(directory + "/run").step.values.tolist() == [0]
    print(f"measured: mis-coupling {float(ds.miscoupling.mean()):.3f}")
    needs = {
        name: (extra, lambda name=name: getattr(tracker, name)) for name, extra in CALLBACKS.items()
    }
    needs["plot"] = "report", lambda: tracker.plot(ds)
    needs["report"] = "report", lambda: tracker.report.write_report("results", "page.html")
    for name, (extra, use) in needs.items():
        try:
            use()
        except ImportError as error:
            assert f"tracker.{name} needs" in str(error) and f"'.[{extra}]'" in str(error), error
            print(error)
        else:
            raise AssertionError(f"tracker.{name} works without its extra")
    for command, extra in COMMANDS.items():
        arguments = [sys.executable, "-m", *command.split()]
        process = subprocess.run(arguments, capture_output=True, text=True)
        assert process.returncode and f"'.[{extra}]'" in process.stderr, process.stderr
        print(process.stderr.strip())
    assert "py.typed" in {file.name for file in importlib.metadata.files(DISTRIBUTION) or ()}


if __name__ == "__main__":
    main()
