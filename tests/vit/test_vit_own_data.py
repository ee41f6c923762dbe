"""Tests of a caller's own data and models: datasets of torchvision and Hugging Face, timm's models and modules."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from io import BytesIO

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms.v2 import Compose, Normalize, ToDtype, ToImage

import tracker
import vit
from tests.conftest import ROOT
from tests.hub_server import serve
from tests.vit.test_vit_train import TINY, assert_same_training
from vit import cells, grid
from vit.command import main
from vit.data import fingerprint, given_data, load
from vit.images import DataError
from vit.model import ModelError, build
from vit.recipe import Recipe, check

FLOATS = Compose([ToImage(), ToDtype(torch.float32, scale=True)])
SMALL = replace(TINY, train_size=None, epochs=2)


class Pairs(list):
    """A map-style dataset: a list of (image, class index)."""


def pixels(n: int, side: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


def pairs(n: int = 64, classes: int = 4) -> Pairs:
    return Pairs((image, i % classes) for i, image in enumerate(pixels(n)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of different sizes, 20 to train on and 6 to test on."""
    path = tmp_path_factory.mktemp("pictures")
    for split, n in (("train", 10), ("test", 3)):
        for c, name in enumerate(("cat", "dog")):
            (path / split / name).mkdir(parents=True)
            for i in range(n):
                array = np.random.default_rng([c, i, n]).integers(0, 256, (20 + 5 * i, 30, 3), dtype=np.uint8)
                Image.fromarray(array).save(path / split / name / f"{i}.png")
    return path


class TestDatasets:
    recipe = replace(SMALL, batch_size=4)

    def same(self, data: vit.Data, folder) -> bool:
        expected = load(replace(self.recipe, data=f"folder:{folder}"))
        return fingerprint(data) == fingerprint(expected) and data.classes == expected.classes

    def test_pil_images_are_read_as_from_a_folder(self, folder):
        splits = [ImageFolder(str(folder / split)) for split in ("train", "test")]
        assert self.same(given_data(splits, self.recipe), folder)

    def test_floats_in_0_1_have_the_same_grey_levels(self, folder):
        splits = [ImageFolder(str(folder / split), FLOATS) for split in ("train", "test")]
        assert self.same(given_data(splits, self.recipe), folder)

    def test_grey_images_get_three_equal_channels(self):
        grey = Pairs((image[:1], label) for image, label in pairs())
        data = given_data((grey, grey), self.recipe)
        assert torch.equal(data.train.images, pixels(64)[:, :1].expand(-1, 3, -1, -1))
        assert data.classes == ["0", "1", "2", "3"]

    def test_train_size_selects_as_in_any_data_set(self):
        few = given_data((pairs(), pairs()), replace(self.recipe, train_size=8)).train
        assert torch.bincount(few.labels).tolist() == [2] * 4

    @pytest.mark.slow
    def test_any_torchvision_dataset_trains(self, tmp_path):
        fake = [FakeData(size, (3, 40, 40), 3, random_offset=size) for size in (64, 12)]
        result = vit.train(replace(SMALL, out=tmp_path / "fake"), data=fake)
        assert result["images"] == {"train": 64, "test": 12} and result["recipe"]["data"].startswith("given:FakeData:")
        assert tracker.open_results(tmp_path / "fake" / "coupling").sizes["step"] > 1

    @pytest.mark.parametrize(
        "data, message",
        [
            (pairs(), "data is a Pairs; give a pair of datasets"),
            ((pairs(), Pairs()), "Pairs has no images"),
            ((Pairs([3]), pairs()), r"item 0 of Pairs is not \(image, class index\)"),
            ((Pairs([(pixels(1)[0], 0.5)]), pairs()), r"item 0 of Pairs is not \(image, class index\)"),
            ((Pairs([(pixels(1)[0], -1)]), pairs()), "item 0 of Pairs has class -1"),
            ((Pairs([("a.png", 0)]), pairs()), "item 0 of Pairs: an image is a str"),
            ((Pairs([(pixels(1)[0].int(), 0)]), pairs()), r"dtype torch\.int32"),
            ((Pairs([(pixels(1), 0)]), pairs()), r"shape \(1, 3, 32, 32\)"),
            ((Pairs([(Normalize([0.5], [0.5])(pixels(1)[0] / 255), 0)]), pairs()), "give images without normalisation"),
        ],
    )
    def test_other_items_are_refused(self, data, message):
        with pytest.raises(DataError, match=message):
            given_data(data, self.recipe)

    def test_data_is_used_as_it_is_or_refused(self):
        data = given_data((pairs(), pairs()), self.recipe)
        assert given_data(data, self.recipe) is data
        for changed, message in (
            ({"image_size": 16}, "image_size=32"),
            ({"train_size": 8}, "leave train_size out"),
            ({"batch_size": 65}, "do not fill a batch"),
        ):
            with pytest.raises(DataError, match=message):
                given_data(data, replace(self.recipe, **changed))

    def test_fingerprint_depends_on_images_labels_and_splits(self):
        def digest(train, test):
            return fingerprint(given_data((train, test), self.recipe))

        other_label = Pairs([(pairs()[0][0], 3), *pairs()[1:]])
        other_pixel = Pairs([(pairs()[0][0] ^ 1, 0), *pairs()[1:]])
        both = [digest(*splits) for splits in ((pairs(), pairs(8)), (other_label, pairs(8)), (other_pixel, pairs(8)))]
        assert len({*both, digest(pairs(8), pairs())}) == 4 and both[0] == digest(pairs(), pairs(8))


@pytest.fixture(scope="module")
def hub(tmp_path_factory, folder):
    """Serve the folder's pictures as a data set with two columns of classes."""
    root = tmp_path_factory.mktemp("hub")
    snapshot = root / "datasets--someone--pets" / "snapshots" / "c0ffee"
    (snapshot / "data").mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("c0ffee")
    kinds = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features(img=datasets.Image(), kind=kinds, size=datasets.ClassLabel(names=["s", "l"]))
    for split in ("train", "validation"):
        samples = ImageFolder(str(folder / split.replace("validation", "test"))).samples
        rows = {
            "img": [file for file, _ in samples],
            "kind": [label for _, label in samples],
            "size": [0] * len(samples),
        }
        table = datasets.Dataset.from_dict(rows, features=features)
        embedded = table.map(lambda row: {"img": {"bytes": encoded(row["img"]), "path": None}}, features=features)
        embedded.to_parquet(str(snapshot / "data" / f"{split}-00000-of-00001.parquet"))
    with serve(root) as server:
        yield server


def encoded(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "png")
    return file.getvalue()


class TestHuggingFace:
    @pytest.mark.slow
    def test_data_set_of_the_hub_has_the_folders_images(self, hub, folder, tmp_path):
        code = (
            "import json, sys; from vit.data import fingerprint, load; from vit.recipe import Recipe\n"
            "data = load(Recipe(data=sys.argv[1], batch_size=4)); print(json.dumps([fingerprint(data), data.classes]))"
        )
        environment = {**os.environ, "HF_HOME": str(tmp_path), **hub.environment}
        command = [sys.executable, "-c", code, "hf:someone/pets:kind"]
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        expected = load(Recipe(data=f"folder:{folder}", batch_size=4))
        assert json.loads(process.stdout) == [fingerprint(expected), ["cat", "dog"]]
        assert len(hub.requested(r"GET /datasets/.*parquet")) == 2

    def local(self, hub) -> str:
        return str(hub.root / "datasets--someone--pets" / "snapshots" / "c0ffee")

    def test_several_columns_of_classes(self, hub, capsys):
        with pytest.raises(DataError, match=r"ClassLabel are kind, size.*choose one: hf:.*c0ffee:kind"):
            load(Recipe(data=f"hf:{self.local(hub)}"))
        with pytest.raises(DataError, match=r"ClassLabel are kind, size \(all: img, kind, size\)"):
            load(Recipe(data=f"hf:{self.local(hub)}:breed"))

    def test_missing_split_and_missing_data_set(self, tmp_path):
        table = datasets.Dataset.from_dict({"a": [1]})
        table.to_parquet(str(tmp_path / "train.parquet"))
        with pytest.raises(DataError, match="has the splits train; it needs train, and test or validation"):
            load(Recipe(data=f"hf:{tmp_path}"))
        with pytest.raises(DataError, match="someone/nothing can't be loaded .*; check the name"):
            load(Recipe(data="hf:someone/nothing"))

    def test_missing_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match="pip install 'block-coupling-tracker"):
            load(Recipe(data="hf:someone/pets"))

    def test_name_of_the_directory(self):
        assert Recipe(data="hf:someone/pets:kind").data_name == "pets"
        assert Recipe(data="given:FakeData:0123").data_name == "FakeData"
        with pytest.raises(ValueError, match="folder:PATH or hf:NAME"):
            check(Recipe(data="hf:"))


def transformer(classes: int = 4, width: int = 16) -> nn.Module:
    """Return a ViT of plain PyTorch."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, width, 8, 8)
            layer = nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Sequential(nn.Linear(width, classes))

        def forward(self, images):
            return self.head(self.encoder(self.patches(images).flatten(2).mT)[:, -1])

    torch.manual_seed(0)
    return Plain()


class Raising(nn.Module):
    """A layer that raises in one of both modes."""

    def __init__(self, error: Exception, in_training: bool):
        super().__init__()
        self.error, self.in_training = error, in_training

    def forward(self, x):
        if self.training == self.in_training:
            raise self.error
        return x


class TestModels:
    data = (pairs(64), pairs(8))

    @pytest.mark.slow
    def test_module_is_trained_in_place_and_measured(self, tmp_path):
        model = transformer()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        result = vit.train(replace(SMALL, out=tmp_path / "own"), data=self.data, model=model)
        assert result["recipe"]["model"].startswith("given:Plain:")
        assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "head" in name)
        units = tracker.open_results(tmp_path / "own" / "coupling")
        assert units.sizes["layer"] == 2 and units.sizes["token"] == 1

    @pytest.mark.slow
    def test_interrupted_training_of_a_module_resumes_exactly(self, tmp_path, monkeypatch):
        vit.train(replace(SMALL, out=tmp_path / "whole"), data=self.data, model=transformer())
        with monkeypatch.context() as patch:
            patch.setattr("vit.training._result", lambda *_: pytest.fail("stopped"))
            patch.setattr("vit.module.write", stop_after_first_epoch)
            with pytest.raises(KeyboardInterrupt):
                vit.train(replace(SMALL, out=tmp_path / "parts"), data=self.data, model=transformer())
        vit.train(replace(SMALL, out=tmp_path / "parts"), data=self.data, model=transformer())
        assert_same_training(tmp_path / "whole", tmp_path / "parts")

    def test_finished_run_is_kept_and_another_model_or_data_refused(self, tmp_path):
        recipe = replace(SMALL, epochs=2, measure_at="off", out=tmp_path / "own")
        first = vit.train(recipe, data=self.data, model=transformer())
        assert vit.train(recipe, data=self.data, model=transformer()) == first
        with pytest.raises(ValueError, match="other settings .*model"):
            vit.train(recipe, data=self.data, model=transformer(width=32))
        with pytest.raises(ValueError, match="other settings .*data"):
            vit.train(recipe, data=(pairs(60), pairs(8)), model=transformer())

    def test_stochastic_depth_of_a_module_is_its_own(self, tmp_path):
        with pytest.raises(ValueError, match=r"drop_path=0.3; a module is trained as it is given"):
            vit.train(replace(SMALL, drop_path=0.3, out=tmp_path / "own"), data=self.data, model=transformer())

    def test_module_that_does_not_fit_is_refused_before_training(self, tmp_path):
        recipe = replace(SMALL, out=tmp_path / "own")
        with pytest.raises(ModelError, match=r"Plain returns \(2, 7\) for 2 images; .*\(2, 4\)"):
            vit.train(recipe, data=self.data, model=transformer(classes=7))
        with pytest.raises(ModelError, match="Linear does not take images"):
            vit.train(recipe, data=self.data, model=nn.Linear(3, 4))
        assert vit.train(replace(recipe, measure_at="off"), data=self.data, model=transformer())["status"] == "finished"

    def test_errors_of_a_device_are_not_taken_for_a_model_that_does_not_fit(self, tmp_path):
        model, error = transformer(), RuntimeError("CUDA error: an illegal memory access was encountered")
        model.head.append(Raising(error, in_training=False))
        with pytest.raises(RuntimeError, match="^CUDA error: an illegal memory access"):
            vit.train(replace(SMALL, out=tmp_path / "own"), data=self.data, model=model)

    def test_a_models_own_arithmetic_error_is_not_a_diverged_training(self, tmp_path):
        recipe, model = replace(SMALL, out=tmp_path / "own", measure_at="off"), transformer()
        model.head.append(Raising(FloatingPointError("overflow encountered in multiply"), in_training=True))
        with pytest.raises(FloatingPointError, match="overflow"):
            vit.train(recipe, data=self.data, model=model)
        assert not cells.is_done(recipe.directory)

    @pytest.mark.slow
    def test_timm_model_takes_the_recipes_image_and_patch_size(self, tmp_path, capsys):
        arguments = (
            "--data digits --model vit_tiny_patch16_224 --epochs 2 --warmup_epochs 1 --train_size 32 --batch_size 32"
        )
        command = f"{arguments} --patch_size 8 --k 2 --probe_size 1 --wandb off --test_every 0 --accelerator cpu --out {tmp_path}"
        assert main([*command.split(), "--measure_at", "2"]) == 0, capsys.readouterr().err
        result, units = cells.read(tmp_path, "result"), tracker.open_results(tmp_path / "coupling")
        assert result["recipe"]["model"] == "vit_tiny_patch16_224" and result["recipe"]["tokens"] is None
        assert units.sizes["layer"] == 12 and units.sizes["token"] == 1

    def test_models_of_timm_without_patches_or_stochastic_depth(self):
        assert build(Recipe(model="resnet18"), 3).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
        with pytest.raises(ModelError, match="xcit_nano_12_p16_224 can.t be built"):
            build(Recipe(model="xcit_nano_12_p16_224"), 3)
        with pytest.raises(ModelError, match="vgg11 has no stochastic depth; give 0"):
            build(Recipe(model="vgg11", drop_path=0.1), 3)

    def test_unknown_name(self):
        with pytest.raises(ModelError, match="no model of this name; the nearest: vit_tiny_patch16_224"):
            build(Recipe(model="vit_tiny_patch16_22"), 3)

    def test_recipes_without_a_model_keep_their_identity(self):
        assert "model" not in Recipe().identity and Recipe().identity["tokens"] == "0,-1"
        assert Recipe(model="resnet18").identity["tokens"] is None


def test_directories_may_be_given_as_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = replace(SMALL, out="run", train_size=32, measure_at="off")
    assert vit.train(recipe)["status"] == "finished" and (tmp_path / "run" / "result.json").exists()
    assert Recipe(data_dir="~/images").data_dir == tmp_path / "images"
    assert Recipe().out is None and Recipe(out=tmp_path).directory == tmp_path
    one = grid.cells(grid.Grid(weight_decays="1", drop_paths="0", out="runs"), TINY)
    assert [str(cell.directory) for cell in one] == ["runs/wd1_sd0_seed0"]
    for option, kind in (("out", Recipe), ("data_dir", Recipe), ("out", grid.Grid)):
        with pytest.raises(ValueError, match=f"--{option} 3; give a directory, as text or as a path"):
            kind(**{option: 3})


def stop_after_first_epoch(directory, name, content):
    """Write a cell's file; after the first epoch's, interrupt once the checkpoint is there."""
    cells.write(directory, name, content)
    if len(content) == 2:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_package_imports_nothing_heavy_and_names_what_it_has():
    code = (
        "import sys, vit; assert not {'torch', 'timm', 'lightning'} & set(sys.modules)\n"
        "from vit import Data, Recipe, Split, train; assert callable(train) and train.__module__ == 'vit.training'\n"
        "try: vit.nothing\n"
        "except AttributeError as error: print(error)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.stdout == "module 'vit' has no attribute 'nothing'\n", process.stderr


def test_grid_reports_an_unsuitable_model_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(grid.processes, "start_server", lambda: None)  # it imports for 10 s, beside other tests
    command = f"--data digits --model vgg11 --drop_paths 0,0.1 --weight_decays 1 --engine processes --wandb off --out {tmp_path}"
    assert grid.main(command.split()) == 2
    assert capsys.readouterr().err == "error: --drop_path 0.1: vgg11 has no stochastic depth; give 0\n"
    assert not (tmp_path / "wd1_sd0_seed0").exists()
