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


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """Add attention and MLP."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def main():
    """Check what works without extras, and what each missing one says."""
    torch.manual_seed(0)
    installed = {name for name in EXTRAS if importlib.util.find_spec(name)}
    assert not installed, f"not a clean environment: {installed}"
    model = nn.Sequential(
        nn.Embedding(50, 32), *(Block(32) for _ in range(3)), nn.LayerNorm(32), nn.Linear(32, 50)
    )
    ds = tracker.measure(model, torch.randint(50, (2, 9)), k=4)
    assert ds.miscoupling.shape == (2, 1, 1, 3, 3)
    with tempfile.TemporaryDirectory() as directory:
        ds.to_netcdf(Path(directory) / "one.nc", engine="netcdf4")
        with tracker.Watch(
            every_n_steps=1, probe=torch.randint(50, (2, 9)), k=4, save_dir=directory + "/run"
        ) as watch:
            watch(0, model)
        assert tracker.open_results(directory + "/run").step.values.tolist() == [0]
    print(
        f"measured: mis-coupling {float(ds.miscoupling.where(ds.layer != ds.layer_other).mean()):.3f}"
    )
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
