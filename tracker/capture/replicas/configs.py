"""Give a replica configs of its own, changed where its forward passes need it."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn


def adjust_configs(replica: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the configs in a replica's modules by changed copies.

    Args:
        replica: of a Hugging Face or TransformerLens model, or any other, which stays as it is.
        dtype: the measuring dtype.
        device: where the replica runs.
    """
    copies: dict[int, Any] = {}

    def replace(part: nn.Module, name: str, change: Callable[[Any], None]) -> None:
        config = part.__dict__[name]
        if id(config) not in copies:
            copies[id(config)] = config, copy(config)  # the original is kept alive, so that its id is not reused
            change(copies[id(config)][1])
        part.__dict__[name] = copies[id(config)][1]

    def of_transformer_lens(config: Any) -> None:
        config.dtype = dtype  # norms cast to it
        if hasattr(config, "device"):
            config.device = str(device)  # each block moves its input there
        if hasattr(config, "n_devices"):
            config.n_devices = 1

    for part in replica.modules():
        if hasattr(part.__dict__.get("config"), "_attn_implementation"):
            replace(part, "config", _of_huggingface)
        if isinstance(getattr(part.__dict__.get("cfg"), "dtype", None), torch.dtype):
            replace(part, "cfg", of_transformer_lens)


def _of_huggingface(config: Any) -> None:
    """Turn off the cache, where a replay would find the block's own keys, and attention that lacks float32 or derivatives.

    Experts are computed one by one, as the grouped kernels support neither float64 nor vmap.
    """
    config.use_cache = False
    if config._attn_implementation not in (None, "eager", "sdpa"):
        config._attn_implementation = "sdpa"
    if getattr(config, "_experts_implementation", None) not in (None, "eager"):
        config._experts_implementation = "eager"
