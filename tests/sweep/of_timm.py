"""timm's models: the smallest name of each family, made tiny where its class takes the sizes."""

import re
from typing import Any

import timm
import torch
from timm.models import _registry
from torch import nn

from tests.support.draws import normal
from tests.sweep import tiny
from tests.sweep.catalogue import PARAMETERS, Built, NotBuilt, finished, last_line

# Families within these modules differ by pooling, registers, position embeddings: each combination of words is one.
TRANSFORMERS = """beit cait convit crossvit deepseek_vit deit eva gemma4_vit hiera levit naflexvit pit qwen3_vit tiny_vit tnt
    vision_transformer vision_transformer_hybrid vision_transformer_relpos vision_transformer_sam volo xcit""".split()
# One each: their members differ in how they convolve.
CONVOLUTIONAL = """byobnet convnext cspnet densenet dla dpn efficientnet ghostnet hgnet hrnet inception_resnet_v2 inception_v3
    mobilenetv3 nfnet regnet res2net resnest resnet resnetv2 rexnet selecsls senet sknet vovnet xception
    xception_aligned""".split()
SIZES = """test atto femto pico nano mini xxtiny xxs xtiny xs ti tiny x s small b base medsmall medium m l large huge giant
    gigantic enormous so xl h g plus d in ink dist dino miil fb ft in1k in21k in22k""".split()
SHAPES = [
    {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 6, "num_heads": 4},
    {"img_size": 64, "patch_size": 16, "embed_dim": 32, "depth": 6, "num_heads": 4},
    {"img_size": 128, "embed_dim": 32, "num_heads": 4},
    {"img_size": 128},
]


def names() -> list[str]:
    """One name of each family: the smallest by the words that say a size."""
    families = {}
    for module, members in _registry._module_to_models.items():
        for name in members - _registry._deprecated_models.keys():
            words = re.findall(r"[a-z]+\d?(?=[^a-z]|$)|[a-z]+", name)
            words = [word for word in words if word not in SIZES and word != "patch"]
            kind = words if module in TRANSFORMERS else [] if module in CONVOLUTIONAL else words[:1]
            families.setdefault((module, *kind), []).append(name)
    return sorted({min(members, key=_size) for members in families.values() if members})


def _size(name: str) -> tuple[int, int, str]:
    words = re.findall(r"[a-z]+", name)
    ranks = [SIZES.index(word) for word in words if word in SIZES]
    return min(ranks, default=len(SIZES)), len(name), name


def build(name: str) -> Built:
    """The model with as many of its sizes overridden as its class takes."""
    failures = []
    for shape in SHAPES:
        try:
            kept = _accepted(name, shape)
        except Exception as error:
            failures.append(last_line(error))
            continue
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=5, **kept)
        parameters = sum(p.numel() for p in model.parameters())
        if parameters > PARAMETERS:
            failures.append(
                f"{parameters / 1e6:.0f} M parameters with {kept or 'the sizes of its own'}"
            )
            continue
        side = kept.get("img_size") or shape["img_size"]
        depth = kept.get("depth")
        small = kept.get("embed_dim") == tiny.WIDTH
        try:
            return finished(
                lambda kept=kept: timm.create_model(name, num_classes=5, **kept),
                lambda model, side=side, small=small: _image(model, side, small),
                False,
                depth if isinstance(depth, int) else None,
            )
        except NotBuilt as error:
            failures.append(str(error))
    raise NotBuilt("no tiny configuration: " + failures[-1])


def _accepted(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Those of the sizes that the class takes, found by trying."""
    kept = dict(shape)
    while True:
        try:
            with torch.device("meta"):
                timm.create_model(name, num_classes=5, **kept)
            return kept
        except TypeError as error:
            unknown = set(re.findall(r"'(\w+)'", str(error))) & kept.keys()
            if "keyword argument" not in str(error) or not unknown:
                raise
            kept = {key: value for key, value in kept.items() if key not in unknown}


def _image(model: nn.Module, side: int, small: bool) -> dict[str, torch.Tensor]:
    channels = getattr(model, "in_chans", 3) or 3
    return {"x": normal(2 if small else 1, channels, side, side)}
