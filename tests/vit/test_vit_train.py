"""Tests of one training run: results, resuming, divergence and validation of options."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import wandb

import tracker
from tests.support import processes
from tests.support.ranks import run_on_two_ranks, two_ranks
from tests.support.vit_trainings import (
    AUGMENTED,
    STAYS,
    TINY,
    assert_same_training,
    assert_same_weights,
    weights,
    write_config,
)
from tests.support.wandb_runs import of, offline_run, records
from tracker.store import Store
from vit import cells, grid
from vit.data import load
from vit.module import Classifier
from vit.recipe import RECIPES, Recipe, check
from vit.train import main, recipe_of
from vit.training import AtomicCheckpoints, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("vit") / "trained"
    train(replace(TINY, out=directory))
    return directory


@pytest.mark.slow
def test_result_history_and_coupling(trained):
    """The recorded loss is that of the plain training images, in evaluation mode."""
    result, progress = (cells.read(trained, name) for name in ("result", "progress"))
    assert result["status"] == "finished" and result["images"] == {"train": 96, "test": 360}
    assert [row["step"] for row in result["history"]] == [3, 6, 9]
    assert result["accuracy"] == result["history"][-1]["test/accuracy"]
    assert result["chance"] == pytest.approx(0.1)  # of one answer for all
    assert result["recipe"]["weight_decay"] == 0.05 and result["environment"]["threads"] == 1
    assert cells.read(trained, "history") == result["history"]
    ds = tracker.open_results(trained / "coupling")
    assert ds.step.values.tolist() == [0, 1, 2, 4, 8, 9] and ds.k.values.tolist() == [2, 4]
    assert (ds.sizes["prompt"], ds.attrs["final_norm"]) == (2, "exclude")
    assert "K = 2, mean over tokens 0, -1;" in tracker.summary(ds).attrs["title"]
    assert [row["step"] for row in progress] == ds.step.values.tolist()
    assert progress[-1]["loss"] == pytest.approx(loss_of(trained, "train"), rel=1e-5)


def loss_of(trained: Path, split: str) -> float:
    """Return the loss of a trained model on all images of a split, as one batch."""
    data, module = load(TINY), Classifier(TINY, 10, steps_per_epoch=3).eval()
    module.load_state_dict(weights(trained))
    images = getattr(data, split)
    with torch.no_grad():
        logits = module(data.normalise(images.images))
        return float(torch.nn.functional.cross_entropy(logits, images.labels))


@pytest.mark.slow
def test_neither_measuring_nor_testing_changes_a_training(trained, tmp_path, monkeypatch):
    """The test loss is the mean over the whole split, also of batches of different sizes: 350 and 10 images."""
    monkeypatch.setattr("vit.loaders.TEST_BATCH", 350)
    result = train(replace(TINY, out=tmp_path, measure_at="off", test_every=0))
    assert ["test/accuracy" in row for row in result["history"]] == [False, False, True]
    assert result["accuracy"] == cells.read(trained, "result")["accuracy"]
    assert_same_weights(trained, tmp_path)
    assert not (tmp_path / "coupling").exists()
    assert result["loss"] == pytest.approx(loss_of(trained, "test"), rel=1e-5)


@pytest.mark.slow
def test_diverged_training_is_recorded_and_reported(tmp_path, capsys):
    cell = ["--config", write_config(tmp_path), "--out", str(tmp_path / "cell")]
    assert main([*cell, "--lr", "1e30"]) == 1
    assert "diverged: the training loss is" in capsys.readouterr().err
    result = cells.read(tmp_path / "cell", "result")
    assert result["status"] == "diverged" and result["accuracy"] is None


@pytest.mark.slow
def test_run_is_not_resumed_with_other_settings(trained):
    with pytest.raises(ValueError, match="epochs was 3, now 4; weight_decay was 0.05, now 0.2"):
        train(replace(TINY, out=trained, epochs=4, weight_decay=0.2))
    assert train(replace(TINY, out=trained, keep_checkpoint=False, threads=2)) == cells.read(
        trained, "result"
    )


def test_a_cell_is_not_trained_twice_at_a_time(tmp_path):
    recipe = replace(TINY, out=tmp_path / "cell")
    with (
        cells.claim(recipe),
        pytest.raises(cells.BusyError, match=rf"trained already \(.*, process {os.getpid()}, "),
    ):
        train(recipe)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"drop_path": float("nan")}, "--drop_path nan; it must be at least 0 and below 1"),
        ({"patch_size": 5}, "--patch_size 5; it has to divide --image_size 32: 2, 4, 8, 16"),
        ({"batch_size": 33, "mixup": 0.8}, "even number; or --mixup 0 --cutmix 0"),
        ({"batch_size": 30, "devices": 4}, "split over 4 devices"),
        ({"width": 33}, "--width 33; it has to be a multiple of --heads 2"),
        ({"data": "folder:"}, "choose cifar10, digits or folder:PATH"),
        ({"epochs": 1}, "--warmup_epochs 1; it has to be below --epochs 1"),
        ({"options": {"k": [4, 64]}}, "each K must lie between 1 and --width 32"),
        ({"measure_at": "-1,2"}, "--measure_at -1,2; steps must not be negative"),
        ({"measure_at": "now"}, "--measure_at 'now'"),
        ({"train_size": 0}, "--train_size 0; it must be at least 1"),
        ({"test_unused": True, "train_size": None}, "--test_unused True; no image is unused"),
        ({"clip": 0.0}, "--clip 0.0; it must be above 0"),
        ({"test_every": 2}, "--test_every 2; it has to divide --epochs 3"),
        ({"weight_decay": -1.0}, "--weight_decay -1.0; it must not be negative"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(settings, message, monkeypatch):
    monkeypatch.setattr("vit.data.load", lambda recipe: pytest.fail("loaded"))
    with pytest.raises(ValueError) as raised:
        train(replace(TINY, **settings))
    assert message in str(raised.value)


@pytest.mark.parametrize("file", RECIPES.glob("*.yaml"), ids=lambda file: file.stem)
def test_every_recipe_is_valid_and_states_time_and_accuracy(file):
    assert "# Time: " in (text := file.read_text()) and "Accuracy: " in text
    check(recipe_of(["--config", file.stem]))


STAYS_IN_MID_EPOCH = (
    STAYS.format(step=5)
    + """
Classifier.training_step = step_or_stay
from vit.train import main
sys.exit(main(sys.argv[2:]))
"""
)


class TestCommandLine:
    def test_options_override_the_recipe(self):
        recipe = recipe_of("--data digits --epochs 7".split())
        assert (recipe.patch_size, recipe.epochs, recipe.mixup) == (8, 7, 0)
        assert recipe_of(["--config", "cifar10"]).patch_size == 4

    def test_usage_errors(self, tmp_path, capsys):
        assert main(["--data", "digits", "--drop_path", "1", "--out", str(tmp_path / "cell")]) == 2
        assert "error: --drop_path" in capsys.readouterr().err
        assert not (tmp_path / "cell").exists()
        assert main(["--data", f"folder:{tmp_path}/nothing", "--out", str(tmp_path / "cell")]) == 2
        assert "nothing/train/CLASS" in capsys.readouterr().err

    @pytest.mark.slow
    def test_interrupted_run_is_resumed(self, trained, tmp_path):
        arguments = ["--config", write_config(tmp_path), "--out", str(tmp_path / "cell")]
        process = processes.start("tests.support.statements", STAYS_IN_MID_EPOCH, *arguments)
        processes.wait_for_line(process, "staying")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 130 and "the same command continues" in err, err
        assert "Traceback" not in err and len(cells.read(tmp_path / "cell", "history")) == 1
        assert main(arguments) == 0
        assert_same_training(trained, tmp_path / "cell")


@pytest.mark.slow
def test_run_killed_in_mid_epoch_is_resumed(tmp_path):
    """After SIGKILL, the same command gives the same result as an uninterrupted run, with every random operation enabled."""
    config = write_config(tmp_path, **AUGMENTED, drop_path=0.3, keep_checkpoint=True)
    directories = [tmp_path / "whole", tmp_path / "killed"]
    whole, killed = (
        ["--config", config, "--out", str(cell), "--devices", "2"] for cell in directories
    )
    ran = processes.run("vit.train", *whole, timeout=900)  # Lightning starts the second rank
    assert ran.returncode == 0, ran.stderr
    with two_ranks("tests.support.statements", STAYS_IN_MID_EPOCH, *killed) as ranks:
        processes.wait_for_line(ranks[0], "staying")
    assert Store(tmp_path / "killed" / "coupling").steps() == [0, 1, 2, 4]
    run_on_two_ranks("vit.train", *killed)
    assert_same_training(*directories)


@pytest.mark.slow
def test_a_training_that_ends_with_its_last_measurement_has_all_of_them(tmp_path, monkeypatch):
    """It is resumed from a checkpoint of the last epoch, from which nothing is left to do."""

    def interrupt(*_):
        raise KeyboardInterrupt

    recipe = replace(TINY, out=tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tracker.CouplingCallback, "on_train_end", interrupt)
        train(recipe)
    assert train(recipe)["status"] == "finished"
    assert Store(tmp_path / "coupling").steps() == [0, 1, 2, 4, 8, 9]


@pytest.mark.slow
def test_each_training_of_a_process_has_a_run_of_its_own_and_the_weights_of_its_seed(tmp_path):
    """A run has the cell and its settings, and what was measured."""
    options = ["--config", write_config(tmp_path, wandb="offline"), "--epochs", "2"]
    directories = [tmp_path / "one", tmp_path / "two"]
    for seed, directory in enumerate(directories):
        more = ["--seed", str(seed), "--measure_at", "6", "--out", str(directory)]
        assert main([*options, *more]) == 0
    runs = [cells.read(directory, "wandb-run") for directory in directories]
    assert all(runs) and runs[0] != runs[1] and wandb.run is None
    embedded = [weights(directory)["model.pos_embed"].ravel() for directory in directories]
    assert torch.corrcoef(torch.stack(embedded))[0, 1] < 0.3, "other initial weights"
    found = records(offline_run(directories[0]))
    run, rows = (json.dumps(of(kind, found)) for kind in ("run", "history"))
    for field in ("wd0.05_sd0.1_seed0", '"digits"', '"wd0.05"', '"sd0.1"', "label_smoothing"):
        assert field in run, field
    assert "test/accuracy" in rows and "miscoupling/mean_offdiag" in rows


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path, monkeypatch):
    checkpoints, file = AtomicCheckpoints(), tmp_path / "new" / "last.ckpt"
    checkpoints.save_checkpoint({"a": torch.ones(2)}, file)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError):
        checkpoints.save_checkpoint({"a": torch.zeros(2)}, file)
    assert torch.equal(checkpoints.load_checkpoint(file)["a"], torch.ones(2))


def test_a_finished_training_is_returned_on_every_rank(tmp_path, monkeypatch):
    recipe = replace(TINY, out=tmp_path)
    tmp_path.joinpath("recipe.json").write_text(json.dumps(recipe.identity))
    tmp_path.joinpath("result.json").write_text('{"accuracy": 1}')
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)
    assert train(recipe) == {"accuracy": 1}


def test_directories_may_be_given_as_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Recipe(data_dir="~/images").data_dir == tmp_path / "images"  # type: ignore[arg-type]
    assert grid.GridCommand(out="runs").out == Path("runs")  # type: ignore[arg-type]
    for option, kind in (("out", Recipe), ("data_dir", Recipe), ("out", grid.GridCommand)):
        with pytest.raises(ValueError, match=f"--{option} 3; give a directory, as text"):
            kind(**{option: 3})
