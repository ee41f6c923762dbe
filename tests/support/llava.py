"""LLaVA, small: a text tower that sees an image's patches."""

from typing import Any

import torch
import transformers
from torch import nn

from tests.support.draws import integers
from tests.support.models import HEADS, VOCABULARY, WIDTH, Size, images

COMMON = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
}
TEXT = Size().common() | {"num_key_value_heads": 2}
VISION = COMMON | {"image_size": 16, "patch_size": 8}
DEEPER = VISION | {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2}
IMAGE = VOCABULARY - 1  # the token that stands for a patch


def of(name: str, **settings: Any) -> nn.Module:
    cls = getattr(transformers, name)
    return cls(cls.config_class(**settings))


def llava() -> nn.Module:
    """Its forward takes the images' features from the hidden states that hooks capture."""
    return of(
        "LlavaForConditionalGeneration",
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**DEEPER),
        image_token_index=IMAGE,
    )


IDS = integers(3, 40, 2, 9, seed=3)
# Four patches of 8 x 8
WITH_PATCHES = torch.cat([IDS[:, :1], torch.full((2, 4), IMAGE), IDS[:, 5:]], 1)
SEEN = {"input_ids": WITH_PATCHES, "pixel_values": images()}
