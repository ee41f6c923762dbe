"""What a measurement leaves as it was: the model, random numbers and global settings."""

import random

import numpy as np
import torch
from transformers import modeling_utils

from tracker.linalg.precision import switches


def snapshot(model):
    return {
        "parameters": {
            n: (p, p.clone(), p.dtype, p.requires_grad, p.grad) for n, p in model.named_parameters()
        },
        "buffers": {n: (b, b.clone()) for n, b in model.named_buffers()},
        "modes": [m.training for m in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "rng": (torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()),
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


def assert_unchanged(model, before):
    assert_same(before, snapshot(model))


def assert_same(before, after):
    for name, (p, value, dtype, wanted, grad) in before["parameters"].items():
        now = after["parameters"][name]
        assert (
            now[0] is p and torch.equal(p, value) and p.dtype == dtype and p.requires_grad == wanted
        )
        assert now[4] is grad
    for name, (b, value) in before["buffers"].items():
        assert after["buffers"][name][0] is b and torch.equal(b, value)
    for part in ("modes", "hooks", "attributes", "attention", "global"):
        assert after[part] == before[part], part
    assert torch.equal(after["rng"][0], before["rng"][0]) and after["rng"][1:] == before["rng"][1:]
