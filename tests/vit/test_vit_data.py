"""Tests of the data sets: images in memory, and the messages about missing or damaged files."""

import hashlib
import pickle
import subprocess
import sys
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from tests.conftest import ROOT
from tests.support.hub_server import serving
from vit import data as data_module
from vit.data import DataError, balanced, load
from vit.loaders import Batches, Order
from vit.recipe import Recipe


@pytest.fixture
def tiny_cifar10(tmp_path, monkeypatch):
    """Serve a CIFAR10 of 60 images, with its own checksums; yield the path of the archive."""
    source = tmp_path / "source" / CIFAR10.base_folder
    source.mkdir(parents=True)
    random = np.random.default_rng(0)
    contents = {
        name: {"data": random.integers(0, 256, (n, 3072), dtype=np.uint8), "labels": LABELS[:n]}
        for name, n in (("data_batch_1", 40), ("test_batch", 20))
    }
    contents["batches.meta"] = {"label_names": list("abcdefghij")}
    for name, content in contents.items():
        (source / name).write_bytes(pickle.dumps(content))
    archive = tmp_path / "source" / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, CIFAR10.base_folder)
    train, test, meta = ([name, md5(source / name)] for name in contents)
    members = {
        "tgz_md5": md5(archive),
        "train_list": [train],
        "test_list": [test],
        "meta": {**CIFAR10.meta, "md5": meta[1]},
    }
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(partial(SimpleHTTPRequestHandler, directory=archive.parent)) as address:
        members["url"] = f"{address}/{archive.name}"
        monkeypatch.setattr(data_module, "CIFAR10", type("Tiny", (CIFAR10,), members))
        yield archive


def md5(file) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


LABELS = [*range(10)] * 4


def cifar10(root) -> Recipe:
    return Recipe(data_dir=root, batch_size=20)


def test_cifar10_is_downloaded_once(tiny_cifar10, tmp_path):
    data = load(cifar10(tmp_path / "here"))
    assert data.train.images.shape == (40, 3, 32, 32) and data.test.images.shape == (20, 3, 32, 32)
    assert data.classes == list("abcdefghij") and data.train.labels.tolist() == LABELS
    batch = pickle.loads((tmp_path / "here" / CIFAR10.base_folder / "data_batch_1").read_bytes())
    np.testing.assert_array_equal(data.train.images[7], batch["data"][7].reshape(3, 32, 32))
    tiny_cifar10.unlink()
    assert torch.equal(load(cifar10(tmp_path / "here")).train.images, data.train.images)


@pytest.mark.parametrize(
    "damage, said",
    [
        (Path.unlink, "is missing, .*can't be downloaded.*--data digits, which needs no network"),
        (lambda archive: archive.write_bytes(b"not the archive"), "checksum is wrong"),
    ],
)
def test_what_can_not_be_downloaded(tiny_cifar10, tmp_path, damage, said):
    damage(tiny_cifar10)
    with pytest.raises(DataError, match=said):
        load(cifar10(tmp_path / "here"))


def digits(**settings) -> data_module.Data:
    return load(Recipe(**{"data": "digits", "batch_size": 20} | settings))


class TestDigits:
    data = digits()

    def test_splits_are_disjoint_balanced_and_fixed(self):
        train, test = self.data.train, self.data.test
        assert (len(train), len(test)) == (1437, 360)
        assert torch.bincount(test.labels).tolist() == [36] * 10
        rows = [row.numpy().tobytes() for part in (train, test) for row in part.images]
        assert len(set(rows)) > 1790  # scikit-learn's digits have few duplicates
        assert torch.equal(test.images, digits(seed=5).test.images)

    def test_images_and_labels_belong_together(self):
        from sklearn.datasets import load_digits

        pixels, labels = map(np.asarray, load_digits(return_X_y=True))
        originals = torch.from_numpy(pixels.reshape(-1, 64) * 255 / 16)
        small = torch.nn.functional.avg_pool2d(self.data.test.images[:50, 0].double(), 4).flatten(1)
        nearest = torch.cdist(small, originals).argmin(1)
        assert labels[nearest].tolist() == self.data.test.labels[:50].tolist()

    def test_normalised_training_pixels_have_mean_0_and_spread_1(self):
        pixels = self.data.normalise(self.data.train.images)
        assert pixels.mean().abs() < 1e-4 and (pixels.std() - 1).abs() < 1e-3

    def test_probe_is_the_same_in_every_run_and_has_all_classes(self):
        probe = self.data.probe(10)
        other = digits(seed=3)
        assert torch.equal(probe, other.probe(10)) and torch.equal(probe[:4], other.probe(4))
        labels = self.data.test.labels
        assert probe.shape == (10, 3, 32, 32) and len(labels[balanced(labels, 10)].unique()) == 10
        with pytest.raises(DataError, match="--probe_size 361; .*at most 360"):
            self.data.probe(361)

    def test_train_size_selects_a_fixed_balanced_subset_and_the_others_are_tested_on_request(self):
        few, again = digits(train_size=25), digits(train_size=25, seed=9, test_unused=True)
        counts = torch.bincount(few.train.labels)
        assert sorted(counts.tolist()) == [2] * 5 + [3] * 5
        assert torch.equal(few.train.images, again.train.images)
        assert torch.equal(digits(train_size=50).train.images[:25], few.train.images)
        assert torch.equal(again.test.images[:360], few.test.images)
        whole = torch.bincount(torch.cat([self.data.train.labels, self.data.test.labels]))
        assert torch.equal(torch.bincount(again.test.labels), whole - counts)

    def test_requesting_more_images_than_exist_is_refused(self):
        with pytest.raises(DataError, match="--train_size 1438; .*at most 1437"):
            digits(train_size=1438)
        with pytest.raises(DataError, match="--batch_size 2000; .*at most 1437"):
            digits(batch_size=2000)

    def test_epoch_yields_every_image_once(self):
        recipe = Recipe(data="digits", batch_size=100, repeats=1)
        loaders = Batches(self.data, recipe)
        loaders.trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False
        )
        batches = list(loaders.train_dataloader())
        assert len(batches) == recipe.steps_per_epoch(1437) == 14
        assert all(
            images.dtype == torch.uint8 and images.shape == (100, 3, 32, 32)
            for images, _ in batches
        )
        assert sum(len(labels) for _, labels in loaders.val_dataloader()) == 360


def test_statistics_are_those_of_float64():
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8)
    images[:, 1] //= 3
    pixels = images.transpose(0, 1).flatten(1).double() / 255
    expected = pixels.mean(1), pixels.std(1)
    torch.testing.assert_close(data_module.statistics(images), expected, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_preparing_cifar10_takes_little_more_memory_than_its_images():
    """60,000 images of 32 pixels are 184 MB; a float32 copy would take 740 MB."""
    code = (
        "import resource, torch\n"
        "from vit.data import Source, prepared\n"
        "from vit.recipe import Recipe\n"
        "def source(n):\n"
        "    read = lambda i, side: (i[:, None] % 251).byte().expand(-1, 3 * side * side).reshape(-1, 3, side, side)\n"
        "    return Source(torch.arange(n) % 10, read)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "data = prepared((source(50_000), source(10_000), list('0123456789')), Recipe())\n"
        "print(peak() - before)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert int(process.stdout) < 600_000, process.stderr  # kilobytes


def test_order_depends_on_seed_and_epoch():
    def order(seed, epoch):
        sampler = Order(60, 1, seed, 0, 1)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    drawn = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(drawn) == 9 and order(0, 0) in drawn


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        random = np.random.default_rng(0)
        for part, n in (("train", 4), ("test", 2)):
            for name in ("cat", "dog"):
                (tmp_path / part / name).mkdir(parents=True)
                for i in range(n):
                    pixels = random.integers(0, 256, (20 + 10 * i, 30, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
        return tmp_path

    def load(self, folder, **settings):
        return load(Recipe(data=f"folder:{folder}", batch_size=4, **settings))

    def test_images_of_any_size_are_cropped_to_squares(self, folder):
        data = self.load(folder)
        assert data.train.images.shape == (8, 3, 32, 32)
        assert data.test.labels.tolist() == [0, 0, 1, 1]
        assert data.classes == ["cat", "dog"]

    def test_val_is_read_where_there_is_no_test(self, folder):
        expected = self.load(folder).test.images
        (folder / "test").rename(folder / "val")
        assert torch.equal(self.load(folder).test.images, expected)

    @pytest.mark.parametrize(
        "name, other, said",
        [
            ("test", "dev", "test/CLASS.* or .*val/CLASS.*is needed"),
            ("test/dog", "test/wolf", r"\['dog', 'wolf'\]"),
        ],
    )
    def test_a_folder_that_is_missing(self, folder, name, other, said):
        (folder / name).rename(folder / other)
        with pytest.raises(DataError, match=said):
            self.load(folder)

    def test_only_the_selected_images_are_decoded(self, folder):
        """The selection is that of the whole data set; a damaged image outside of it is not read."""
        train = self.load(folder).train
        selected = balanced(train.labels, 6)
        unused, _ = {*range(8)}.difference(selected.tolist())
        sorted((folder / "train").rglob("*.png"))[unused].write_bytes(b"damaged")
        few = self.load(folder, train_size=6).train
        assert torch.equal(few.images, train.images[selected])

    def test_damaged_image(self, folder):
        file = folder / "train" / "dog" / "2.png"
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(DataError, match=r"dog/2\.png can't be read"):
            self.load(folder)
