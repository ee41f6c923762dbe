"""Compare each element of the recipe with DeiT's, built by timm from the arguments of DeiT's main.py (docs/vit.md)."""

import argparse
import random
import re
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.data.auto_augment import AugmentOp
from timm.data.mixup import Mixup
from timm.data.transforms_factory import create_transform
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import VisionTransformer
from timm.optim._optim_factory import create_optimizer
from timm.scheduler.scheduler_factory import create_scheduler
from torchvision import transforms
from torchvision.transforms.v2.functional import to_pil_image

from tests.conftest import ROOT
from tests.support.photographs import MEAN, photographs
from vit.augment import augment, erase
from vit.data import load
from vit.loaders import Batches, Order
from vit.model import build
from vit.module import Classifier
from vit.recipe import Recipe
from vit.train import recipe_of

STD = torch.tensor([0.2, 0.25, 0.3])
# The defaults of DeiT's main.py (github.com/facebookresearch/deit), as far as they are not timm's.
DEIT = {
    "epochs": 300,
    "opt": "adamw",
    "opt_eps": 1e-8,
    "momentum": 0.9,
    "weight_decay": 0.05,
    "sched": "cosine",
    "lr": 5e-4,
    "warmup_lr": 1e-6,
    "min_lr": 1e-5,
    "warmup_epochs": 5,
    "cooldown_epochs": 10,
}


@pytest.fixture(scope="module")
def module():
    return Classifier(Recipe(), 10, steps_per_epoch=97)


@pytest.mark.slow
def test_image_augmentation_has_the_distribution_of_deits_transform(monkeypatch):
    """Each pixel's mean and standard deviation over 1,500 draws of crop, flip, RandAugment, normalisation and erasing."""
    # timm's posterize to 0 bits is refused by Pillow 13, which is why the level is at most 9.999.
    monkeypatch.setattr(AugmentOp, "__call__", _ignoring_posterize_to_nothing(AugmentOp.__call__))
    theirs = create_transform(
        input_size=32,
        is_training=True,
        color_jitter=0.3,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
        mean=tuple(MEAN.tolist()),
        std=tuple(STD.tolist()),
    )
    theirs.transforms[0] = transforms.RandomCrop(32, padding=4)  # type: ignore[union-attr]
    assert not any(isinstance(one, transforms.ColorJitter) for one in theirs.transforms)  # type: ignore[union-attr]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    recipe, image = Recipe(), photographs(1)
    one_by_one = torch.stack([theirs(to_pil_image(image[0])) for _ in range(1500)])
    batch = augment(image.repeat(1500, 1, 1, 1), recipe, MEAN).float() / 255
    batch = erase((batch - MEAN[:, None, None]) / STD[:, None, None], recipe.erasing)
    for of, share in ((torch.mean, 0.05), (torch.std, 0.06)):
        assert (of(batch, 0) - of(one_by_one, 0)).abs().mean() < share * one_by_one.std()


def _ignoring_posterize_to_nothing(call):
    def guarded(self, image):
        try:
            return call(self, image)
        except ValueError as error:
            assert "bits" in str(error)
            return image

    return guarded


@pytest.mark.parametrize("name, tokens", [("cifar10", 65), ("cifar10_patch2", 257)])
def test_model_is_deits_at_32_pixels(name, tokens):
    """On the same weights the same logits as timm's model with DeiT-Ti's arguments, as a fork of DeiT by an author has it."""
    recipe = recipe_of(["--config", name])
    theirs = VisionTransformer(
        img_size=32,
        patch_size=recipe.patch_size,
        embed_dim=192,
        depth=12,
        num_heads=3,
        mlp_ratio=4,
        qkv_bias=True,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
        num_classes=10,
    ).eval()
    ours = build(recipe, 10).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(images), theirs(images)) and ours.pos_embed.shape[1] == tokens
    assert (recipe.epochs, recipe.batch_size) == (300, 512)


def test_initial_weights_have_deits_standard_deviations():
    """Truncated normal, 0.02, without biases; the projection of patches is PyTorch's convolution, as in DeiT."""
    weights = dict(build(Recipe(), 10).named_parameters())
    biases = [name for name in weights if name.endswith("bias") and "patch" not in name]
    assert biases and not any(weights[name].any() for name in biases)
    projection = weights["patch_embed.proj.weight"]
    # Uniform, of 4 * 4 * 3 inputs
    assert float(projection.abs().max()) == pytest.approx(48**-0.5, rel=0.01)
    assert float(projection.std()) == pytest.approx(48**-0.5 / 3**0.5, rel=0.05)
    assert float(weights["cls_token"].std()) == pytest.approx(0.02, rel=0.2)
    for name in ("pos_embed", "blocks.3.attn.qkv.weight", "blocks.3.mlp.fc2.weight", "head.weight"):
        assert float(weights[name].std()) == pytest.approx(0.02, rel=0.05)


def test_stochastic_depth_rises_linearly_over_the_blocks():
    model = build(Recipe(drop_path=0.3), 10)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]
    np.testing.assert_allclose(rates, np.linspace(0, 0.3, 12), atol=1e-7)
    assert rates == [getattr(block.drop_path2, "drop_prob", 0.0) for block in model.blocks]


def test_optimizer_is_deits(module):
    """The same parameters decay; rate, betas and epsilon are equal."""
    ours = module.configure_optimizers()["optimizer"]
    theirs = create_optimizer(argparse.Namespace(**DEIT), module.model)
    assert type(ours) is type(theirs)

    def groups(optimizer):
        wanted = ("weight_decay", "lr", "betas", "eps")
        return {
            id(p): [group[name] for name in wanted]
            for group in optimizer.param_groups
            for p in group["params"]
        }

    for group in ours.param_groups:  # the schedule has set the first step's rate
        group["lr"] = group["initial_lr"]
    assert groups(ours) == groups(theirs)
    undecayed = {name for name, p in module.model.named_parameters() if groups(ours)[id(p)][0] == 0}
    vectors = {name for name, p in module.model.named_parameters() if p.ndim == 1}
    assert undecayed == vectors | {"cls_token", "pos_embed"}


def test_the_rate_is_in_proportion_to_the_images_of_a_step():
    module = Classifier(Recipe(batch_size=128), 10, steps_per_epoch=97)
    optimizer = module.configure_optimizers()["optimizer"]
    assert {group["initial_lr"] for group in optimizer.param_groups} == {5e-4 * 128 / 512}


def test_schedule_passes_through_deits_at_the_start_of_every_epoch(module):
    """DeiT changes the rate once an epoch, and one epoch later than the schedule says; ours follows it step by step."""
    ours = module.configure_optimizers()
    theirs = create_optimizer(argparse.Namespace(**DEIT), module.model)
    by_epoch, _ = create_scheduler(argparse.Namespace(**DEIT), theirs)
    by_step = ours["lr_scheduler"]["scheduler"]
    for epoch in range(300):
        by_epoch.step(epoch)
        by_step.step_update(epoch * 97)
        assert ours["optimizer"].param_groups[0]["lr"] == pytest.approx(
            theirs.param_groups[0]["lr"], rel=1e-6
        )


def test_loss_is_deits_with_mixing_and_without(module):
    logits, labels = torch.randn(8, 10), torch.arange(8)
    module.model, kept = torch.nn.Identity(), module.model
    try:
        for seed in range(4):
            targets = []
            for smoothing in (0.0, 0.1):
                np.random.seed(seed)
                mixup = Mixup(0.8, 1.0, label_smoothing=smoothing, num_classes=10)
                targets.append(mixup(torch.randn(8, 3, 32, 32), labels)[1])
            ours = module.training_step((logits, targets[0]), 0)
            torch.testing.assert_close(ours, SoftTargetCrossEntropy()(logits, targets[1]))
        ours = module.training_step((logits, labels), 0)
        torch.testing.assert_close(ours, LabelSmoothingCrossEntropy(0.1)(logits, labels))
    finally:
        module.model = kept
        module.train_loss.reset()


def test_mixup_and_cutmix_are_deits():
    """Same random seed, same images and, after smoothing by the loss, same targets."""
    data = load(Recipe(data="digits", batch_size=8))
    ours = Batches(data, Recipe(data="digits")).mixup
    images = torch.randn(8, 3, 32, 32)
    labels = torch.arange(8)
    theirs = Mixup(0.8, 1.0, None, 1.0, 0.5, "batch", label_smoothing=0.1, num_classes=10)
    assert ours is not None
    for seed in range(8):
        pairs = []
        for mixup in (ours, theirs):
            np.random.seed(seed)
            pairs.append(mixup(images.clone(), labels))
        assert torch.equal(pairs[0][0], pairs[1][0])
        torch.testing.assert_close(0.9 * pairs[0][1] + 0.1 / 10, pairs[1][1])


def test_test_images_are_only_normalised():
    """As DeiT's are at 32 pixels, with the statistics of the training images in place of ImageNet's."""
    data = load(Recipe(data="digits", batch_size=8))
    theirs = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(data.mean.tolist(), data.std.tolist())]
    )
    expected = torch.stack([theirs(to_pil_image(image)) for image in data.test.images[:20]])
    torch.testing.assert_close(data.normalise(data.test.images[:20]), expected)


@pytest.mark.parametrize("repeats, world", [(3, 1), (3, 2), (1, 1), (1, 2)])
def test_repeated_augmentation_is_deits_sampler(repeats, world):
    """On the same random seed, in the same order; DeiT cuts the epoch at a multiple of 256 images, here it is whole."""
    for rank in range(world):
        order = Order(600, repeats, seed=7, rank=rank, world=world)
        order.set_epoch(4)
        drawn, cut = list(order), 600 // 256 * 256 // world
        assert len(drawn) == 600 // world and drawn[:cut] == deits_sampler(
            600, repeats, world, rank, order.epoch
        )
    if world == 1:
        assert torch.tensor(drawn).bincount().unique().tolist() in ([0, repeats], [repeats])


def deits_sampler(images: int, repeats: int, world: int, rank: int, epoch: int) -> list[int]:
    """Return the draws of DeiT's `RASampler` (samplers.py)."""
    permutation = torch.randperm(images, generator=torch.Generator().manual_seed(epoch)).tolist()
    repeated = [image for image in permutation for _ in range(repeats)]
    total = -(-images * repeats // world) * world
    repeated += repeated[: total - len(repeated)]
    return repeated[rank:total:world][: images // 256 * 256 // world]


def test_ranks_and_epochs_draw_different_augmentations():
    module, drawn = Classifier(Recipe(depth=1, width=3, heads=1), 10, steps_per_epoch=1), set()
    for rank, epoch in product((0, 1), (0, 1, 2)):
        module._trainer = SimpleNamespace(global_rank=rank, current_epoch=epoch)  # type: ignore[assignment]
        module.on_train_epoch_start()
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 6


def test_the_table_names_tests_that_exist():
    """Every row of docs/vit.md's table is verified by tests of this directory, or says that it is not tested."""
    _, _, text = (ROOT / "docs" / "vit.md").read_text().partition("## DeiT, element by element")
    lines = text.partition("\n## ")[0].splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("|")][2:]
    files = Path(__file__).parent.glob("test_*.py")
    defined = {*re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files))}
    assert len(rows) > 15
    for element, *_, tests in rows:
        named = set(re.findall(r"`(test_\w+)`", tests))
        assert named <= defined and (named or tests.strip() == "not tested"), element
