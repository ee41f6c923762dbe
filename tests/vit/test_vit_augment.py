"""Compare the batched augmentation with the PIL operations of DeiT's recipe."""

import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm
from timm.data.random_erasing import RandomErasing
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from tests.support.photographs import MEAN, POLICY, photographs
from vit.augment import HIGHEST_LEVEL, apply, erase, padded_crop, parse, rand_augment

FILL = tuple(round(255 * m) for m in MEAN.tolist())
MOVES = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
SIGNED = {*MOVES} | {
    f"{name}Increasing" for name in ("Color", "Contrast", "Brightness", "Sharpness")
}


def noise(count: int) -> torch.Tensor:
    return torch.randint(
        256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(2), dtype=torch.uint8
    )


def with_pil(image: torch.Tensor, name: str, level: float, sign: int, monkeypatch) -> torch.Tensor:
    """Apply timm's operation at this level and sign, with DeiT's bicubic resampling."""
    monkeypatch.setattr(timm, "_randomly_negate", lambda value: sign * value)
    op = timm.AugmentOp(
        name, 1.0, 10 * level, {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    )
    return pil_to_tensor(op(to_pil_image(image)))


@pytest.mark.parametrize("name", POLICY.names)
@pytest.mark.parametrize(
    "level, sign, kind", [(0.9, 1, "smooth"), (0.33, 1, "noise"), (0.9999, -1, "smooth")]
)
def test_each_operation_equals_timms_within_one_grey_level(name, level, sign, kind, monkeypatch):
    images = photographs(3) if kind == "smooth" else noise(3)
    levels = torch.full((3,), level)
    choice = torch.full((3,), POLICY.names.index(name))
    ours = apply(images, POLICY.names, choice, levels, sign * levels, MEAN)
    theirs = torch.stack([with_pil(image, name, level, sign, monkeypatch) for image in images])
    assert (ours.int() - theirs.int()).abs().max() <= 1
    if name in MOVES and kind == "smooth":
        assert (ours == theirs).float().mean() > 0.99
    assert (ours != images).any() or (name == "AutoContrast") or torch.equal(theirs, images)
    opposite = apply(images, POLICY.names, choice, levels, -sign * levels, MEAN)
    assert torch.equal(opposite, ours) == (name not in SIGNED)


def test_every_image_has_its_own_operation_level_and_sign():
    images, level = photographs(40), torch.rand(40)
    draws = torch.randint(-1, len(POLICY.names), (40,)), level, level * (torch.randn(40).sign())
    together = apply(images, POLICY.names, *draws, MEAN)
    for i in range(40):
        image, *of_image = (of[i : i + 1] for of in (images, *draws))
        assert torch.equal(together[i : i + 1], apply(image, POLICY.names, *of_image, MEAN))
    unchanged = draws[0] == -1
    assert torch.equal(together[unchanged], images[unchanged])
    assert torch.equal(images, photographs(40))


def test_random_draws_follow_the_notation(monkeypatch):
    """Each of two layers applies to half the images, with all operations equally often and levels around 0.9, at most 1."""
    calls = []
    monkeypatch.setattr(
        "vit.augment.apply", lambda images, names, *draws: (calls.append(draws), images)[1]
    )
    rand_augment(torch.zeros(30_000, 3, 1, 1, dtype=torch.uint8), POLICY, MEAN)
    assert len(calls) == 2
    for choice, level, signed, _ in calls:
        applied = choice[choice >= 0]
        assert len(applied) == pytest.approx(15_000, abs=600)
        assert (torch.bincount(applied, minlength=15) / len(applied) - 1 / 15).abs().max() < 0.01
        assert level.max() == pytest.approx(HIGHEST_LEVEL / 10) and level.std() < 0.06
        assert level.median() == pytest.approx(0.9, abs=0.01) and torch.equal(signed.abs(), level)
        assert (signed < 0).float().mean() == pytest.approx(0.5, abs=0.02)


def test_notation_without_a_batched_form_is_refused():
    assert parse("rand-m5-n3-p0.25-inc1").layers == 3
    for notation in ("rand-m9", "rand-m9-inc1-tweights", "augmix-m5", "rand-x3-inc1"):
        with pytest.raises(ValueError, match="--rand_augment"):
            parse(notation)


def test_crops_are_windows_of_the_padded_image():
    images = photographs(200)
    cropped = padded_crop(images, 4)
    padded = torch.nn.functional.pad(images, [4] * 4)
    offsets = []
    for image, crop in zip(padded, cropped, strict=True):
        windows = image.unfold(1, 32, 1).unfold(2, 32, 1)  # (3, 9, 9, 32, 32)
        offsets += (windows == crop[:, None, None]).all(-1).all(-1).all(0).nonzero()
    assert len(offsets) == 200
    for along in torch.stack(offsets, 1):
        assert {*along.tolist()} == {*range(9)}


def test_erasing_has_timms_distribution():
    images, areas = torch.zeros(4000, 3, 32, 32), []
    timms = RandomErasing(0.25, mode="pixel", device="cpu")
    for erased in (erase(images, 0.25), timms(images.clone())):
        changed = (erased != 0).all(1)
        rows, columns = (changed.any(dim) for dim in (2, 1))
        for side in (rows, columns):  # without gaps: from 0 to 1 and back once
            assert torch.diff(side.int(), prepend=torch.zeros(4000, 1)).eq(1).sum(1).max() == 1
        assert torch.equal(changed, rows[:, :, None] & columns[:, None]), "a rectangle"
        area = changed.flatten(1).float().mean(1)
        areas.append(area[area > 0])
        assert erased[erased != 0].std() == pytest.approx(1, abs=0.02)
    ours, theirs = (torch.stack([area.mean(), area.std()]) for area in areas)
    torch.testing.assert_close(ours, theirs, rtol=0.06, atol=0)
    assert len(areas[0]) == pytest.approx(len(areas[1]), rel=0.1)
