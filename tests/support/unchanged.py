"""What a measurement leaves as it was: the model, random numbers and global settings."""

import os
import random

import numpy as np
import torch
from torch import Tensor, nn
from transformers import modeling_utils

from tracker.linalg.precision import switches

PLAIN = (bool, int, float, str, type(None), torch.dtype)


def snapshot(model):
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, module in model.named_modules():
        buffers |= {f"{name}.{k}": v for k, v in vars(module).items() if isinstance(v, Tensor)}
    config = getattr(model, "config", None)
    return {
        "parameters": {
            n: (p, p.clone(), *_writes(p), p.dtype, p.requires_grad, p.grad)
            for n, p in parameters.items()
        },
        "buffers": {n: (b, b.clone(), *_writes(b)) for n, b in buffers.items()},
        "names": [*parameters, *buffers],
        "attributes": {n: _attributes(m) for n, m in model.named_modules()},
        "attention": getattr(config, "_attn_implementation", None),
        "config": str(config.to_dict()) if hasattr(config, "to_dict") else None,
        "rng": (
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tobytes(),
            # beartype draws from Python's numbers while it checks shapes
            None if os.environ.get("CHECK_SHAPES") == "1" else random.getstate(),
        ),
        "global": (
            torch.is_grad_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            torch.nn.functional.scaled_dot_product_attention,
            torch.is_autocast_enabled("cpu"),
            torch.get_float32_matmul_precision(),
            [switch.fp32_precision for switch in switches()],
            torch.get_num_threads(),
            modeling_utils.AttentionInterface.get_interface,
        ),
    }


def _writes(tensor: Tensor) -> tuple[int | None, int]:
    """Return how often a tensor was written to, which one made in inference mode does not count, and where its memory is."""
    return None if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _attributes(module: nn.Module) -> dict:
    """Return the plain attributes of a module, the names of all, and how many hooks it has."""
    held = vars(module)
    plain = {name: value for name, value in held.items() if isinstance(value, PLAIN)}
    hooks = {name: len(value) for name, value in held.items() if name.endswith("_hooks")}
    return plain | hooks | {"names": sorted(held)}


def assert_unchanged(model, before):
    assert_same(before, snapshot(model))


def assert_same(before, after):
    assert not differences(before, after)


def differences(before, after, parts=("rng", "global")) -> list[str]:
    """Name what differs between two snapshots: of the model, and of these parts of the process."""
    tensors = before["parameters"] | before["buffers"]
    now = after["parameters"] | after["buffers"]
    changed = [name for name, old in tensors.items() if name in now and not _same(old, now[name])]
    modules = before["attributes"]
    changed += [name for name in modules if modules[name] != after["attributes"].get(name)]
    parts = ("names", "attention", "config", *parts)
    return changed + [part for part in parts if after[part] != before[part]]


def _same(old, new) -> bool:
    """Whether a tensor is the same object with the same values, and its gradient, if it may have one, the same object."""
    (tensor, values, *state), (now, values_now, *state_now) = old, new
    return (
        now is tensor
        and torch.equal(values, values_now)
        and all(
            a is b or (not isinstance(a, Tensor) and a == b)
            for a, b in zip(state, state_now, strict=True)
        )
    )
