"""Small trainings of vision transformers: recipes, processes that stay in mid-training, and what makes two the same."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import xarray as xr

import tracker
from tests.support.stores import lasting
from vit import cells
from vit.recipe import SETTINGS, Recipe

TINY = Recipe(
    data="digits",
    patch_size=8,
    width=32,
    depth=2,
    heads=2,
    epochs=3,
    batch_size=32,
    train_size=96,
    warmup_epochs=1,
    repeats=1,
    mixup=0.0,
    cutmix=0.0,
    rand_augment="off",
    erasing=0.0,
    flip=0.0,
    lr=2.4e-2,
    options={"k": [2, 4]},
    probe_size=2,
    threads=1,
    accelerator="cpu",
    wandb="off",
)
AUGMENTED = {
    "mixup": 0.8,
    "cutmix": 1.0,
    "rand_augment": "rand-m9-mstd0.5-inc1",
    "erasing": 0.25,
    "repeats": 3,
    "flip": 0.5,
}
HARD = replace(TINY, **AUGMENTED, drop_path=0.3)
GRID_STEPS = "0,1,9"


def write_config(directory: Path, **more) -> str:
    """Write TINY, without the options that a grid varies, to a YAML file; return its path."""
    settings = {name: value for name, value in TINY.identity.items() if name not in SETTINGS}
    settings |= {"threads": 1, "accelerator": "cpu", "wandb": "off", **more}
    file = directory / "tiny.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML
    return str(file)


def grid_arguments(directory: Path, *more: str, jobs: int = 1, **recipe) -> list[str]:
    """Return the command line of a grid of two by two cells, measured at three steps."""
    recipe = {"measure_at": GRID_STEPS, **recipe}
    varied = ["--weight_decays", "0.01,0.1", "--drop_paths", "0,0.1"]
    place = ["--out", str(directory / "grid"), "--jobs", str(jobs)]
    return ["--config", write_config(directory, **recipe), *varied, *place, *more]


# The training stays before this step until it is stopped.
STAYS = """
import sys, time
from vit.module import Classifier
training_step = Classifier.training_step

def step_or_stay(self, *batch):
    if self.trainer.global_step == {step}:
        if self.trainer.is_global_zero:
            print("staying", flush=True)
        time.sleep(600)
    return training_step(self, *batch)

"""


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the checkpoint of a training."""
    return torch.load(directory / "last.ckpt", weights_only=False)["state_dict"]


def assert_same_weights(a: Path, b: Path):
    """Assert that the weights of two trainings are bit-identical."""
    for name, value in weights(a).items():
        assert torch.equal(value, weights(b)[name]), name


def assert_same_training(a: Path, b: Path):
    """Assert that accuracy, history, weights and coupling are bit-identical."""
    results = [cells.read(directory, "result") for directory in (a, b)]
    for result in results:
        del result["seconds"], result["environment"]["created"]
        for row in result["history"]:
            del row["seconds"]
    assert results[0] == results[1]
    assert_same_weights(a, b)
    units = [tracker.open_results(directory / "coupling") for directory in (a, b)]
    xr.testing.assert_identical(*map(lasting, units))
