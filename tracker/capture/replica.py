"""Stateless replicas of a model.

The caller's model is only ever read. Its module tree is copied without hooks or compiled wrappers, put in eval mode, and
lent the caller's weights in the measuring dtype for as long as a pass lasts. So bf16 and fp16 weights are measured in
float32, hooks on the caller's modules never fire, and there is nothing to restore when measuring raises. Lists, dictionaries
and cache objects that the modules hold are copied (`copies`); tensors share the caller's memory until a forward pass
writes to them (`guard`).

Memory: the weights outside the blocks, and one block's, in the measuring dtype at a time; where dtype and device are
already the measuring ones the weights are shared, not copied.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.find import Blocks, unwrap
from tracker.capture.attention import hook_attn_method
from tracker.capture.copies import clone_if_tensor, copy_nested
from tracker.capture.guard import Shared, WriteGuard
from tracker.capture.weights import is_plain, plain_class, plain_tensor
from tracker.errors import UsageError


class Replica:
    """A copy of a model's module tree that borrows the model's weights, in a given dtype on a given device."""

    def __init__(self, model: nn.Module, blocks: Blocks, dtype: torch.dtype, device: torch.device):
        self._shared = Shared()
        self.module = _Copy(self._shared).of(model)
        for part in self.module.modules():
            hook_attn_method(part)
            if isinstance(part.__dict__.get("_dtype"), torch.dtype):  # what a LightningModule says of itself
                part.__dict__.update(_dtype=dtype, _device=device)
        _settle_configs(self.module)
        self.blocks = [] if blocks.spans else [self.module.get_submodule(name) for name in blocks.names]
        self.description = blocks
        self.dtype = dtype
        self.device = device
        self.stateless: set[int] = set()  # blocks, by id, that were found to keep no state between calls
        self._writers: set[int] = set()  # modules, by id, that write to their weights or buffers

    def guard(self) -> WriteGuard:
        """A context for every forward pass: what it writes to the caller's tensors goes to copies of them."""
        return WriteGuard(self._shared)

    def begin_call(self) -> None:
        """Watch what a block writes from here on."""
        self._shared.begin()

    def end_call(self, block: nn.Module) -> None:
        """Undo what the block wrote to its weights, and remember that it does."""
        if self._shared.undo():
            self._writers.add(id(block))

    def fresh_weights(self, block: nn.Module) -> AbstractContextManager[None]:
        """For one call of a block that has its weights: copies of them, if it writes to them."""
        return self.materialize(block) if id(block) in self._writers else nullcontext()

    @contextmanager
    def materialize(
        self, module: nn.Module | None, but: Sequence[nn.Module] = (), dtype: torch.dtype | None = None
    ) -> Iterator[None]:
        """Lend `module` (but not the parts listed in `but`) its weights on the device, in the measuring dtype or `dtype`."""
        dtype = dtype or self.dtype
        copy = id(module) in self._writers
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
                        name: self._lend(part, name, t, dtype, copy, converted) for name, t in tensors.items()
                    }
                for hook in part.__dict__.get("_weight_hooks", ()):  # a forward pass may have built the part
                    hook(part, ())
            with self._shared.lent(converted.values()):
                yield
        finally:
            for part, store, tensors in borrowed:
                part.__dict__[store] = tensors

    def _lend(
        self,
        part: nn.Module,
        name: str,
        tensor: Tensor | None,
        dtype: torch.dtype,
        copy: bool,
        converted: dict[int, Tensor],
    ) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in converted:
            plain = self.convert(plain_tensor(part, name, tensor), dtype)
            converted[id(tensor)] = plain.clone() if copy or name in part._buffers else plain
        return converted[id(tensor)]

    def own(self, value: Any) -> Any:
        """A copy of what a forward pass is given, nested or not, its tensors converted: the pass may write to it."""

        def leaf(entry: Any) -> Any:
            converted = self.convert(entry) if isinstance(entry, Tensor) else entry
            return clone_if_tensor(converted) if converted is entry else converted

        return copy_nested(value, leaf, {})

    def convert(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """On the device; in the measuring dtype, or `dtype`, if it is floating."""
        tensor = tensor.to(self.device, (dtype or self.dtype) if tensor.is_floating_point() else tensor.dtype)
        return tensor.clone() if tensor.is_inference() else tensor  # inference tensors can't enter a graph


class _Copy:
    """Copies a module tree: own dictionaries and containers, shared tensors, no hooks, eval mode, compiled wrappers left out."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.memo: dict[int, Any] = {}  # by id of the original

    def of(self, module: nn.Module) -> nn.Module:
        """The copy of a module and of all it holds; one copy for each module, however often it is held."""
        module = unwrap(module)
        if id(module) in self.memo:
            return self.memo[id(module)]
        twin = self.memo[id(module)] = object.__new__(plain_class(type(module)))
        state = twin.__dict__
        for name, value in module.__dict__.items():
            if name in _HOOKS:
                state[name] = OrderedDict()
            elif name in ("_parameters", "_buffers", "_modules"):
                state[name] = {key: None if entry is None else self.leaf(entry) for key, entry in value.items()}
            else:
                state[name] = copy_nested(value, self.leaf, self.memo)
        state.update(training=False, _compiled_call_impl=None)
        # Hooks that compute a weight before each forward pass (weight_norm, prune) are part of the model's function.
        state["_weight_hooks"] = [
            h for h in module._forward_pre_hooks.values() if type(h).__module__.startswith("torch.nn.utils")
        ]
        _own_methods(module, twin)
        return twin

    def leaf(self, value: Any) -> Any:
        """What a copied module holds in place of a value that is no container."""
        if isinstance(value, nn.Module):
            return self.of(value)
        if isinstance(value, Tensor) and is_plain(value):
            if id(value) not in self.memo:  # tied weights stay tied
                self.memo[id(value)] = self.shared.share(value)
            return self.memo[id(value)]
        return value


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
