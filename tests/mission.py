"""What users come for, once and in one process, so that coverage shows which statements of the product they reach.

    coverage run --source tracker,vit,checkpoints -m tests.mission build/mission && coverage report

A statement that no job reaches is there for a kind of model, an option or a fault that is rarer, or for nothing.
"""

import importlib
import io
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import tracker
from checkpoints import nano
from tests.conftest import TINY
from tests.golden import cases
from tests.support.home_made import LM, Flat
from tests.support.hub_server import serve
from tests.support.lightning_runs import Classifier, fit, trainer
from tests.support.models import Size, build
from tracker import pythia
from tracker.walk.command import Walk

MODULES = {"tracker.figures": "tracker.figures.__main__", "tracker.report": "tracker.report.write"}
SMALL_VIT = (
    *"--data digits --patch_size 8 --width 32 --depth 2 --heads 2 --batch_size 32 --epochs 2".split(),
    *"--warmup_epochs 1 --train_size 96 --probe_size 2 --k 2,4 --threads 1 --accelerator cpu".split(),
    *("--wandb", "offline"),
)
GRID = (
    *("--jobs", "1", "--weight_decays", "0.01,0.1", "--drop_paths", "0,0.1", "--seeds", "0,1"),
    *("--rand_augment", "off", "--out", "grid"),
)
# Of the recipe for CIFAR10, which that for digits leaves out
AUGMENTED = ("--rand_augment", "rand-m9-mstd0.5-inc1", "--erasing", "0.25", "--flip", "0.5")
# Measurements whose results `tests.golden` compares: families of models, precisions, padding, spans, small budgets.
KINDS = (
    *("prompts", "bert", "grouped keys", "experts", "deit", "bfloat16", "padding", "models"),
    *("full sequence", "spans", "tokenwise", "small memory", "krylov", "watch"),
)


def run(module: str, *arguments: str, expected: int = 0) -> str:
    """Run a command line in this process, which ends with the expected status; return what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        status = importlib.import_module(MODULES.get(module, module)).main([*arguments])
    assert status == expected, (module, arguments, printed.getvalue())
    return printed.getvalue()


def measure_and_read(directory: Path) -> None:
    """Measure a language model and two vision transformers, and read the result in every way."""
    model, ids = build("gpt_neox", Size(width=64))
    ds = tracker.measure(model, ids, k=[2, 4], measures="all,tokenwise", pair_tokens=3)
    print(
        tracker.summary(ds), tracker.find_blocks(model), tracker.measure(model, ids, dry_run=True)
    )
    tracker.curves(ds), tracker.scalars(ds)
    tracker.measure(model, ids, k=4, tokens=[0, -1], keep="jacobian")
    tracker.null_level(ds, "miscoupling")
    tracker.plot(ds).savefig(directory / "one.png")
    for name in ("vit", "timm vit"):
        tracker.measure(*build(name), k=4)


def measure_own_models(directory: Path) -> None:
    """Measure models whose blocks have no common name, and one whose blocks have to be given."""
    from vit_pytorch import ViT

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = (
                nn.LayerNorm(16),
                nn.MultiheadAttention(16, 2, batch_first=True),
            )

        def forward(self, x):
            y = self.norm(x)
            return x + self.attention(y, y, y, need_weights=False)[0]

    tracker.measure(nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 5, 16), k=4)
    # Blocks without a module for attention
    tracker.measure(LM(Flat), torch.randint(7, (2, 5)), k=4)
    vit = ViT(
        image_size=16, patch_size=8, num_classes=5, dim=16, depth=3, heads=2, mlp_dim=32, dim_head=8
    ).eval()
    try:
        tracker.measure(vit, torch.randn(2, 3, 16, 16), k=4)
    except ValueError as error:  # proposes a line with `blocks=`
        print(error)


def train_with_lightning(directory: Path) -> None:
    """Train with the callback, with a CSV file and W&B as loggers, which watches the module."""
    from lightning.pytorch.loggers import CSVLogger, WandbLogger

    def watched() -> Classifier:
        module = Classifier()
        training.loggers[1].watch(module, log_freq=1)
        return module

    callback = tracker.CouplingCallback(
        every_n_steps=2, k=(2, 4), max_overhead=None, save_dir=str(directory / "store")
    )
    training = trainer([callback], max_steps=4)
    training.loggers = [
        CSVLogger(str(directory)),
        WandbLogger(offline=True, save_dir=str(directory)),
    ]
    fit(training, watched)
    cases.keep_curve(directory)
    tracker.plot(str(directory / "store"))


def train_with_transformers(directory: Path) -> None:
    """Train with transformers' Trainer, and walk the checkpoints that it saved, with scores."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=2)
    )
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (32, 12))]
    arguments = TrainingArguments(
        str(directory / "trainer"), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_steps=2,
    )  # fmt: skip
    training = Trainer(model, arguments, train_dataset=samples)
    store = str(directory / "store")
    training.add_callback(
        tracker.TransformersCallback(every_n_steps=2, trainer=training, k=4, save_dir=store)
    )
    training.train()
    torch.save(torch.randint(64, (2, 12)), directory / "inputs.pt")
    (directory / "scores.csv").write_text("step,task,value\n2,copying,0.25\n4,copying,0.5\n")
    run(
        *(
            "tracker.pythia",
            "--model",
            "trainer",
            "--inputs",
            "inputs.pt",
            "--scores",
            "scores.csv",
        ),
        *("--k", "4", "--out", "walked", "--wandb", "off", "--device", "cpu"),
    )


def walk_published_checkpoints(directory: Path) -> None:
    """Walk a suite on a hub, with downloads and a resumed walk; then figures, page and replay."""
    import huggingface_hub.constants as hub

    root = shutil.copytree(nano.train(recipe=TINY), directory / "hub")
    options = ("--k", "4,8", "--device", "cpu", "--memory_budget", "1GB", "--wandb", "offline")
    walk = (
        "tracker.pythia",
        "--model",
        "block-coupling/nano",
        *options,
        "--measures",
        "all,tokenwise",
        "--out",
        "out",
    )
    with serve(root) as server, mock.patch.multiple(
        hub,
        HF_HUB_CACHE=str(directory / "cache"),
        HF_HUB_OFFLINE=False,
        ENDPOINT=server.endpoint,
        HUGGINGFACE_CO_URL_TEMPLATE=server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    ):  # fmt: skip
        run(*walk, "--dry_run")
        run(*walk, "--steps", "0,1")
        run(*walk)
    run("tracker.figures", "list", "out")
    run("tracker.figures", "all", "out", "--out", "figures")
    run(
        "tracker.figures",
        "heatmap",
        "out",
        "--measure",
        "offdiag_normalized",
        "--step",
        "4",
        "--out",
        "figures",
    )
    run("tracker.report", "out")
    run(
        "tracker.report",
        "out",
        str(directory.parent / "train_with_transformers" / "store"),
        "--out",
        "both.html",
    )
    run("tracker.replay", "out", "--wandb", "offline", "--log", "all")
    run("tracker.pythia", "--model", "70m", "--dry_run")
    print(tracker.summary(tracker.open_results("out")))


def load_own(path: Path) -> nn.Module:
    """Load a model whose weights a program of the user saved."""
    model = LM(Flat)
    model.load_state_dict(torch.load(path)["model"])
    return model


def walk_own_files(directory: Path) -> None:
    """Walk files that a program of the user saved, and draw their curves."""
    for step in (10, 20):
        torch.save({"model": LM(Flat).state_dict()}, directory / f"ckpt_{step}.pt")
    walk = Walk(
        files=str(directory / "ckpt_*.pt"), load=load_own, inputs=torch.randint(7, (2, 5)), out=directory / "out", wandb="off",
        options={"k": (4,)},
    )  # fmt: skip
    assert pythia.run(walk) == 0
    tracker.plot(str(directory / "out"))


def train_vision_transformers(directory: Path) -> None:
    """Train one model with the recipe of DeiT and a grid, and analyse the grid."""
    run("vit.train", *SMALL_VIT, *AUGMENTED, "--out", "one")
    run("vit.grid", *SMALL_VIT, *GRID, "--dry_run")
    run("vit.grid", *SMALL_VIT, *GRID)
    run("vit.analysis", "grid")


JOBS: tuple[Callable[[Path], None], ...] = (
    measure_and_read,
    measure_own_models,
    train_with_lightning,
    train_with_transformers,
    walk_published_checkpoints,
    walk_own_files,
    train_vision_transformers,
)


def main(out: Path) -> None:
    """Do all jobs below a new directory."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    out = out.resolve()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TRACKER_CACHE": str(out / "cache"),
        "HOME": str(out),
    }
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Training nano is no job of a user's; under coverage it takes half an hour.
    subprocess.run([sys.executable, "-c", "from checkpoints import nano; nano.train()"], check=True)
    # The cases of `tests.golden` run their command lines as processes, which coverage would not see.
    cases.run = lambda directory, module, *arguments: _in(
        directory, lambda: run(module, *arguments)
    )
    of_kinds = {kind: cases.CASES[kind] for kind in KINDS}
    for name, job in (of_kinds | {job.__name__: job for job in JOBS}).items():
        started, directory = time.perf_counter(), out / name
        directory.mkdir()
        _in(directory, lambda job=job, directory=directory: job(directory))
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


def _in(directory: Path, work: Callable[[], str | None]) -> str:
    with chdir(directory):
        return work() or ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
