"""Tests of timm's models in place of DeiT."""

import pytest
import torch

import tracker
from vit import cells
from vit.model import ModelError, build
from vit.recipe import Recipe
from vit.train import main


@pytest.mark.slow
def test_timm_model_takes_the_recipes_image_and_patch_size(tmp_path, capsys):
    arguments = (
        "--data digits --model vit_tiny_patch16_224 --epochs 2 --warmup_epochs 1 --train_size 32 --batch_size 32 "
        f"--patch_size 8 --k 2 --probe_size 1 --wandb off --test_every 0 --accelerator cpu --out {tmp_path} --measure_at 2"
    )
    assert main(arguments.split()) == 0, capsys.readouterr().err
    result, units = cells.read(tmp_path, "result"), tracker.open_results(tmp_path / "coupling")
    assert result["recipe"]["model"] == "vit_tiny_patch16_224" and result["recipe"]["tokens"] is None
    assert units.sizes["layer"] == 12 and units.sizes["token"] == 1


def test_models_of_timm_without_patches_or_stochastic_depth():
    assert build(Recipe(model="resnet18"), 3).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    with pytest.raises(ModelError, match="xcit_nano_12_p16_224 can.t be built"):
        build(Recipe(model="xcit_nano_12_p16_224"), 3)
    with pytest.raises(ModelError, match="vgg11 has no stochastic depth; give 0"):
        build(Recipe(model="vgg11", drop_path=0.1), 3)
    with pytest.raises(ModelError, match="no model of this name; the nearest: vit_tiny_patch16_224"):
        build(Recipe(model="vit_tiny_patch16_22"), 3)
    with pytest.raises(ModelError, match="inception_v3 can.t be built for images of 32 pixels"):
        build(Recipe(model="inception_v3", drop_path=0.0), 3)
