"""Stateless replicas of a model.

The caller's model is only ever read. Its module tree is copied without tensors, hooks or compiled wrappers, put in eval
mode, and lent the caller's weights in the measuring dtype for as long as a pass lasts. So bf16 and fp16 weights are
measured in float32, hooks on the caller's modules never fire, and there is nothing to restore when measuring raises.

Memory: the weights outside the blocks, and one block's, in the measuring dtype at a time; where dtype and device are
already the measuring ones the weights are shared, not copied.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tracker.attention import method_door
from tracker.blocks import Blocks, UsageError, unwrap
from tracker.weights import plain_class, plain_tensor


class Replica:
    """A copy of a model's module tree that borrows the model's weights, in a given dtype on a given device."""

    def __init__(self, model: nn.Module, blocks: Blocks, dtype: torch.dtype, device: torch.device):
        self.module = _copy_tree(model, {})
        for part in self.module.modules():
            method_door(part)
            if isinstance(part.__dict__.get("_dtype"), torch.dtype):  # what a LightningModule says of itself
                part.__dict__.update(_dtype=dtype, _device=device)
        _settle_configs(self.module)
        self.blocks = [self.module.get_submodule(name) for name in blocks.names]
        self.description = blocks
        self.dtype = dtype
        self.device = device

    @contextmanager
    def weights(
        self, module: nn.Module | None, but: Sequence[nn.Module] = (), dtype: torch.dtype | None = None
    ) -> Iterator[None]:
        """Lend `module` (but not the parts listed in `but`) its weights on the device, in the measuring dtype or `dtype`."""
        dtype = dtype or self.dtype
        skipped = {id(part) for block in but for part in block.modules()}
        converted: dict[int, Tensor] = {}  # tied weights stay tied
        borrowed = []
        try:
            for part in module.modules() if module is not None else ():
                if id(part) in skipped:
                    continue
                for store in ("_parameters", "_buffers"):
                    tensors = part.__dict__[store]
                    borrowed.append((part, store, tensors))
                    part.__dict__[store] = {
                        name: self._lend(part, name, t, dtype, converted) for name, t in tensors.items()
                    }
                for hook in part.__dict__["_weight_hooks"]:
                    hook(part, ())
            yield
        finally:
            for part, store, tensors in borrowed:
                part.__dict__[store] = tensors

    def _lend(
        self, part: nn.Module, name: str, tensor: Tensor | None, dtype: torch.dtype, converted: dict[int, Tensor]
    ) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in converted:
            plain = self.convert(plain_tensor(part, name, tensor), dtype)
            # A forward pass may count in its buffers; parameters are not written to without gradients.
            converted[id(tensor)] = plain.clone() if name in part._buffers else plain
        return converted[id(tensor)]

    def convert(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """On the device; in the measuring dtype, or `dtype`, if it is floating."""
        tensor = tensor.to(self.device, (dtype or self.dtype) if tensor.is_floating_point() else tensor.dtype)
        return tensor.clone() if tensor.is_inference() else tensor  # inference tensors can't enter a graph


def _copy_tree(module: nn.Module, twins: dict[int, nn.Module]) -> nn.Module:
    """The same modules over the same tensors: own dictionaries, no hooks, eval mode, compiled wrappers left out."""
    module = unwrap(module)
    if id(module) in twins:
        return twins[id(module)]
    twin = twins[id(module)] = object.__new__(plain_class(type(module)))
    state = twin.__dict__
    # Plain containers are copied, so that what a forward pass appends to them stays with the replica.
    state.update({k: copy(v) if type(v) in (list, dict, set) else v for k, v in module.__dict__.items()})
    state.update({name: OrderedDict() for name in _HOOKS if name in state}, training=False, _compiled_call_impl=None)
    # Hooks that compute a weight before each forward pass (weight_norm, prune) are part of the model's function.
    state["_weight_hooks"] = [
        h for h in module._forward_pre_hooks.values() if type(h).__module__.startswith("torch.nn.utils")
    ]
    state["_parameters"] = dict(module._parameters)
    state["_buffers"] = dict(module._buffers)
    state["_modules"] = {
        name: None if child is None else _copy_tree(child, twins) for name, child in module._modules.items()
    }
    _own_methods(module, twin)
    return twin


_HOOKS = [name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called"))]


def _own_methods(module: nn.Module, twin: nn.Module) -> None:
    """Bind methods kept on the instance to the replica, and leave out what accelerate and `torch.compile` wrap around it.

    Raises:
        UsageError: for a forward that somebody else put in the place of the class's own.
    """
    state = twin.__dict__
    for name, value in list(state.items()):
        if isinstance(value, MethodType) and value.__self__ is module:
            state[name] = MethodType(value.__func__, twin)
    if "_hf_hook" in state or hasattr(state.get("forward"), "_torchdynamo_orig_callable"):
        state.pop("forward", None)
    if "forward" in state and not isinstance(state["forward"], MethodType):
        raise UsageError(
            f"the forward of {type(module).__name__} was replaced on the instance by {state['forward']!r}; it can't be "
            "told what that computes: measure the model without it, or make it a method or a subclass"
        )


def _settle_configs(replica: nn.Module) -> None:
    """Give a Hugging Face replica configs of its own: no cache, in which a block's replay would meet itself; attention
    that knows float32 and derivatives; experts one by one, as the grouped kernels know no float64 and no batches.
    """
    own: dict[int, Any] = {}
    for part in replica.modules():
        config: Any = part.__dict__.get("config")
        if not hasattr(config, "_attn_implementation"):
            continue
        if id(config) not in own:
            settled = own[id(config)] = copy(config)
            settled.use_cache = False
            if settled._attn_implementation not in (None, "eager", "sdpa"):
                settled._attn_implementation = "sdpa"
            if getattr(settled, "_experts_implementation", None) not in (None, "eager"):
                settled._experts_implementation = "eager"
        part.__dict__["config"] = own[id(config)]
