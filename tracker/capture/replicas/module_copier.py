"""Copy a model's module tree.

The copy has no hooks and no compiled wrappers and is in eval mode. Lists, dictionaries and cache objects that the modules hold
are copied (`copies`); tensors share the caller's memory until a forward pass writes to them (`guard`).

What a library attaches to a model at its first use is copied as any other attribute, except hooks. The attribute by which
transformers knows that it has attached them is dropped with them, so that it attaches them to the copy when it needs them.
"""

from collections import OrderedDict
from types import MethodType
from typing import Any

from torch import Tensor, nn

from tracker.blocks.wrappers import path_inside
from tracker.capture.random_numbers import Generator, Generators, copy_generator
from tracker.capture.replicas.copies import copy_nested
from tracker.capture.replicas.guard import SharedTensors
from tracker.capture.replicas.weights import is_plain, plain_class
from tracker.errors import UsageError


class ModuleCopier:
    """Copy a module tree: own dictionaries and containers, shared tensors, no hooks, eval mode, no compiled wrappers."""

    def __init__(self, shared: SharedTensors, generators: Generators) -> None:
        self.shared = shared
        self.generators = generators
        self.memo: dict[int, Any] = {}  # by id of the original

    def copy(self, module: nn.Module) -> nn.Module:
        """Copy a module and all its parts; each module has one copy, however many modules hold or wrap it."""
        steps, module = path_inside(module)
        new = self.memo[id(module)] if id(module) in self.memo else self._copy(module)
        for step in steps:
            if not hasattr(new, step):  # the model's own code may reach through a wrapper: self.net.module.embed(x)
                new.__dict__[step] = new
        return new

    def _copy(self, module: nn.Module) -> nn.Module:
        new = self.memo[id(module)] = object.__new__(plain_class(type(module)))
        state = new.__dict__
        for name, value in module.__dict__.items():
            if name == _HOOKS_INSTALLED:
                continue
            if name in _HOOKS:
                state[name] = OrderedDict()
            elif name in ("_parameters", "_buffers", "_modules"):
                state[name] = {key: None if entry is None else self.copy_leaf(entry) for key, entry in value.items()}
            else:
                state[name] = copy_nested(value, self.copy_attribute, self.memo)
        state.update(training=False, _compiled_call_impl=None)
        # Hooks that compute a weight before each forward pass (weight_norm, prune) are part of the model's function.
        state["_weight_hooks"] = [
            h for h in module._forward_pre_hooks.values() if type(h).__module__.startswith("torch.nn.utils")
        ]
        _rebind_methods(module, new)
        return new

    def copy_attribute(self, value: Any) -> Any:
        """Copy what a module holds besides weights. Inference tensors are copied; those in weights, when a pass uses them."""
        if isinstance(value, Tensor) and value.is_inference():
            return self.shared.share(value.clone())
        return self.copy_leaf(value)

    def copy_leaf(self, value: Any) -> Any:
        """Copy a module, or a generator, share a plain tensor, keep anything else; `copy_nested` has handled containers."""
        if isinstance(value, nn.Module):
            return self.copy(value)
        if isinstance(value, Tensor) and is_plain(value):
            if id(value) not in self.memo:  # tied weights stay tied
                self.memo[id(value)] = self.shared.share(value)
            return self.memo[id(value)]
        if isinstance(value, Generator):
            self.generators.held.append(copy_generator(value))
            return self.generators.held[-1]
        return value


_HOOKS_INSTALLED = "_output_capturing_hooks_installed"  # of transformers.utils.output_capturing
_HOOKS = [name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called"))]


def _rebind_methods(module: nn.Module, new: nn.Module) -> None:
    """Bind methods stored on the instance to its copy, and drop the forwards that accelerate and `torch.compile` installed.

    Raises:
        UsageError: if anything else replaced the forward on the instance.
    """
    state = new.__dict__
    for name, value in list(state.items()):
        if isinstance(value, MethodType) and value.__self__ is module:
            state[name] = MethodType(value.__func__, new)
    if "_original_forward" in state:  # what accelerate wrapped in autocast
        state["forward"] = state.pop("_original_forward")
    if "_hf_hook" in state or hasattr(state.get("forward"), "_torchdynamo_orig_callable"):
        state.pop("forward", None)
    if "forward" in state and not isinstance(state["forward"], MethodType):
        raise UsageError(
            f"the forward of {type(module).__name__} was replaced on the instance by {state['forward']!r}, and what that "
            "computes is not known: measure the model without it, or make it a method or a subclass"
        )
