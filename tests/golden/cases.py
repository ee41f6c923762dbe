"""The cases, each of which writes NetCDF, JSON, CSV and text to its directory.

Only public entry points are used, so that the same file runs before and after a change inside the package.
"""

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn

import tracker
from checkpoints import nano
from tests.support import plain_loop
from tests.support.lightning_runs import fit, trainer
from tests.support.models import Size, build, neox, tokens

Case = tuple[nn.Module, Any]
ROOT = Path(tracker.__file__).parents[1]
PROMPTS = [
    "for name in sorted(names, key=len):\n    print(",
    "import os",
    "The function raises an error if",
]
EVERYTHING = "all,tokenwise,eigenvalues"
WALK = [
    *"tracker.pythia --model nano --steps 0,16,256 --k 4,8 --measures".split(),
    EVERYTHING,
    *"--prompts prompts.txt --memory_budget 1GB --device cpu --wandb off --out store".split(),
]
GRID = [
    *"vit.grid --data digits --patch_size 8 --width 32 --depth 2 --heads 2 --batch_size 32".split(),
    *"--epochs 2 --warmup_epochs 1 --train_size 96 --probe_size 2 --k 2,4".split(),
    *"--weight_decays 0.01 --drop_paths 0.1 --repeats 1 --jobs 1 --threads 1".split(),
    *"--accelerator cpu --wandb off --out grid".split(),
]
# What the machine decides: durations, and the rate of a product
DURATION = re.compile(r"\b\d[\d.e+-]* (s|min|h|TFLOP/s)(?!\w)")


def run(directory: Path, *arguments: str) -> str:
    """Run a command line in a directory, with the package under test; return what it prints, without durations."""
    command = [sys.executable, "-P", "-m", *arguments]
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=directory, env=settings, stdout=subprocess.PIPE, text=True, check=True
    )
    return DURATION.sub("TIME", done.stdout)


def of_dry_run(cost: Any) -> str:
    """Return what a dry run prints, without durations and the line breaks, whose places depend on the durations' lengths."""
    return DURATION.sub("TIME", re.sub(r"\n {13}", " ", str(cost)))


def walk(directory: Path):
    """Walk nano; keep its store, curve, null level, summary and table, the page's data and the tables of all figures."""
    nano.load()  # trained beforehand where it isn't kept, so that the walk does not print that
    (directory / "prompts.txt").write_text(
        "\n".join(prompt.replace("\n", "\\n") for prompt in PROMPTS)
    )
    (directory / "dry_run.txt").write_text(of_dry_run(run(directory, *WALK, "--dry_run")))
    (directory / "walk.txt").write_text(run(directory, *WALK))
    keep_curve(directory)
    keep_figures(directory, "store")
    keep_page(directory, directory / "store" / "report.html")


def models(directory: Path):
    """Compare four random models with scores: the figures and the page of several results."""
    names = [f"model{i}" for i in range(4)]
    for i, name in enumerate(names):
        store = tracker.Store(directory / name)
        store.check_settings({"model": name})
        for step in (0, 2000):
            torch.manual_seed(1000 * i + step)
            unit = tracker.measure(neox(size=Size(32 + 8 * i)), tokens(4), k=[4, 8])
            unit["score"] = xr.DataArray(
                [0.1 * i + 1e-5 * step, 0.3], {"task": ["gsm8k", "wino"]}, "task"
            )
            store.write(step, unit.assign_coords(step=step, tokens_seen=1e6 * (step + i)))
    keep_figures(directory, *names)
    run(directory, "tracker.report", *names, "--out", "report.html")
    keep_page(directory, directory / "report.html")


def keep_figures(directory: Path, *stores: str):
    """Write the tables of all figures that the stores allow, and what the others lack."""
    (directory / "figures.txt").write_text(
        run(directory, "tracker.figures", "all", *stores, "--out", "figures")
    )
    remove(directory, "figures/*.pdf", "figures/*.png")


def keep_page(directory: Path, page: Path):
    """Write the data that a page holds, in place of the page."""
    found = dict(
        re.findall(
            r'<script type="application/json" id="(\w+)">(.*?)</script>', page.read_text(), re.S
        )
    )
    write_json(directory / "page.json", {name: json.loads(text) for name, text in found.items()})
    page.unlink()


def keep_curve(directory: Path):
    """Write what Python makes of the store of a walk or a training run."""
    curve = tracker.open_results(directory / "store")
    curve.to_netcdf(directory / "curve.nc")
    tracker.null_level(curve, "miscoupling").to_netcdf(directory / "null_level.nc")
    (directory / "summary.txt").write_text(str(tracker.summary(curve)))


def grid(directory: Path):
    """Train one cell of a grid of vision transformers, and analyse it."""
    (directory / "grid.txt").write_text(run(directory, *GRID))
    run(directory, "vit.analysis", "grid")
    remove(directory, "*.ckpt", "log.txt", "*.png", "report.html")


def remove(directory: Path, *patterns: str):
    """Remove what is not compared."""
    for file in (file for pattern in patterns for file in directory.rglob(pattern)):
        file.unlink()


def lightning_run(directory: Path):
    """Train with the callback, which chooses its probe itself."""
    callback = tracker.CouplingCallback(
        every_n_steps=2, k=(2, 4), max_overhead=None, save_dir=str(directory / "store")
    )
    fit(trainer([callback], max_steps=4))
    keep_curve(directory)


def watch(directory: Path):
    """Train in a plain loop; keep all metrics that are logged, too."""
    rows = {}
    watch = tracker.Watch(
        2,
        probe=tokens(),
        k=2,
        max_overhead=None,
        log="all",
        log_to=lambda metrics, step: rows.setdefault(step, {}).update(metrics),
        save_dir=str(directory / "store"),
    )
    plain_loop.train(watch)
    watch.close()
    write_json(directory / "metrics.json", rows)
    keep_curve(directory)


def prompts(directory: Path):
    """Measure prompts of different lengths with a tokenizer."""
    model, tokenizer = nano.load()
    measured(lambda: (model, PROMPTS), directory, tokenizer=tokenizer, max_tokens=8)


def measured(make: Callable[[], Case], directory: Path, **options: Any):
    """Measure a model; keep the Dataset and what is warned of."""
    model, inputs = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        ds = tracker.measure(model, inputs, **options)
        cost = tracker.measure(model, inputs, dry_run=True, **options)
    ds.to_netcdf(directory / "dataset.nc")
    (directory / "warnings.txt").write_text("\n".join(str(warning.message) for warning in caught))
    (directory / "dry_run.txt").write_text(of_dry_run(cost))


def padded(name: str) -> Case:
    """Return a model and three texts of different lengths."""
    model, ids = build(name, samples=3)
    there = torch.arange(ids.shape[1]) < torch.tensor([[7], [4], [5]])
    return model, {"input_ids": ids * there, "attention_mask": there.long()}


def rounded() -> Case:
    model, ids = build("gpt_neox")
    return model.bfloat16(), ids


def spans() -> tuple[nn.Module, Tensor]:
    """Return a model whose blocks are no modules."""
    import x_transformers

    torch.manual_seed(0)
    layers = x_transformers.Decoder(dim=32, depth=3, heads=4, attn_dim_head=8)
    return x_transformers.TransformerWrapper(
        num_tokens=50, max_seq_len=16, attn_layers=layers
    ), tokens()


SPANS = [f"input of attn_layers.layers.{i}.0.0" for i in (0, 2, 4)] + [
    "input of attn_layers.final_norm"
]


def write_json(file: Path, value: Any):
    file.write_text(json.dumps(value))


CASES = {
    "walk": walk,
    "models": models,
    "grid": grid,
    "lightning": lightning_run,
    "watch": watch,
    "prompts": prompts,
    "bert": partial(measured, lambda: padded("bert")),
    "padding": partial(measured, lambda: padded("gpt2"), measures="all", tokens=[0, -1]),
    "grouped keys": partial(
        measured, lambda: build("llama, grouped keys"), measures=EVERYTHING, keep="jacobian"
    ),
    "experts": partial(measured, lambda: build("mixtral"), measures="all"),
    "deit": partial(measured, lambda: build("timm deit, distilled")),
    "bfloat16": partial(measured, rounded),
    # Jacobians and states wait in files.
    "small memory": partial(
        measured, lambda: build("gpt_neox"), measures="all", memory_budget=20_000
    ),
    "krylov": partial(measured, lambda: build("gpt_neox", Size(width=128)), svd="krylov", k=4),
    "spans": partial(measured, spans, blocks=SPANS),
    "full sequence": partial(measured, lambda: build("bloom"), measures="all"),
    "tokenwise": partial(
        measured, lambda: build("gpt_neox"), measures="tokenwise", pair_tokens=3, pair_layers=0
    ),
}
