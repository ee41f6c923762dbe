"""What a measurement leaves as it was: the model, random numbers and global settings."""

import numpy as np
import torch
from transformers import modeling_utils

from tracker.linalg.precision import switches


def snapshot(model):
    """Return what is compared, by part; its parameters are its buffers, too, each with its values."""
    tensors = {
        name: (tensor, tensor.clone(), tensor.dtype, tensor.requires_grad, tensor.grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "parameters": tensors,
        "modes": [m.training for m in model.modules()],
        "hooks": [len(getattr(m, kind)) for m in model.modules() for kind in hooks],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "rng": (torch.get_rng_state().tolist(), np.random.get_state()[1].tobytes()),
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
    tensors = after["parameters"]
    for name, (tensor, value, dtype, wanted, grad) in before["parameters"].items():
        now, _, *held, grad_now = tensors[name]
        assert now is tensor and grad_now is grad, name
        assert torch.equal(now, value) and held == [dtype, wanted], name
    for part in before.keys() - {"parameters"}:
        assert after[part] == before[part], part
