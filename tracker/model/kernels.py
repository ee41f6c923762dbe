"""Tell kernels of transformers' attention and experts, which compute a family's own function, from registered functions.

A model's config names its attention, which `AttentionInterface` looks up; `AttentionMaskInterface` looks up by the same name how
its mask is made. transformers' kernels (flash_attention_*, flex_attention, paged|*, and kernels of the hub that stand for flash
attention) compute what the family's eager attention computes. A function that a user registered computes anything, and a name
without a registered mask gets no mask. Experts are likewise looked up in `ExpertsInterface`.
"""

import sys
from typing import Any

from torch import nn

# The modules of transformers.integrations whose attention functions compute softmax attention with a mask.
KERNELS = ("flash_attention", "flash_paged", "flex_attention", "eager_paged", "sdpa_paged")


def is_kernel(name: str | None) -> bool:
    """Whether the attention that a config names is a kernel that a replica replaces: one for the family's own attention."""
    if name in (None, "eager", "sdpa"):
        return False
    function = _registered("transformers.modeling_utils", "AttentionInterface", name)
    of_mask = _registered("transformers.masking_utils", "AttentionMaskInterface", name)
    # A paged kernel gets its mask from its cache.
    mask_is_made = name.startswith("paged|") or _module_of(of_mask) == "transformers.masking_utils"
    return function is None or (
        mask_is_made
        and _module_of(function) in [f"transformers.integrations.{kernel}" for kernel in KERNELS]
    )


def is_experts_kernel(name: str | None) -> bool:
    """Whether the experts that a config names are a kernel of transformers, which supports neither float64 nor vmap."""
    if name in (None, "eager"):
        return False
    function = _registered("transformers.integrations.moe", "ExpertsInterface", name)
    return function is None or _module_of(function).startswith("transformers.integrations.")


def supports_sdpa(model: nn.Module) -> bool:
    """Whether `sdpa` computes the attention of all Hugging Face models in `model`; it has no soft caps and no sinks."""
    return all(getattr(type(part), "_supports_sdpa", True) for part in model.modules())


def _registered(module: str, interface: str, name: str) -> Any:
    registry = getattr(sys.modules.get(module), interface, None)
    return None if registry is None else registry._global_mapping.get(name)


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""
