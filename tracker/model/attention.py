"""Intercept a model's attention without changing its code.

Every part of a block but attention acts row by row, so a block can be restricted to single rows by replacing its attention,
o = softmax(scale q K^T + mask) V, alone. Hooks intercept it:

- `torch.nn.functional.scaled_dot_product_attention` (timm, torchvision, `nn.MultiheadAttention`, plain PyTorch);
- `AttentionInterface.get_interface` of transformers, which looks up attention functions, `eager` included;
- the `_attn` method of older transformers families (GPT-J, GPT-Neo), on the replica's own modules.

Inside `intercept_attention(handler)`, every attention of this thread calls

    handler(attention)

with a call of the model's own attention, whose scale, soft cap, sinks, window and so on are its function's. The model uses what
the handler returns; `attention()` is what it would have computed.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Formula:
    """softmax(cap tanh(scale q K^T / cap) + mask) V, as far as a hook's arguments show it; its values are checked later."""

    scale: float | None = None  # None: e^-1/2
    cap: float | None = None  # of the scores
    sinks: Tensor | None = None  # (H,): one more score for each head, with no value


@dataclass(frozen=True)
class OriginalAttention:
    """A call of a model's own attention function.

    Attributes:
        function: of query, key, value, mask and causal.
        query: (B, H, m, e).
        key, value: (B, H_kv, n, e).
        mask: that the model made, or None.
        causal: whether it is causal by position when it has no mask.
        formula: if the hook knows it.
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Any]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    causal: bool
    formula: Formula | None = None
    # From (B, H, m, e) to what the model expects
    format_output: Callable[[Tensor], Any] = lambda output: output

    def __call__(self) -> Any:
        """Compute the model's own attention."""
        return self.function(self.query, self.key, self.value, self.mask, self.causal)


AttentionHandler = Callable[[OriginalAttention], Any]

# Installed hooks are process-wide; the handler belongs to one thread, so a model running in another thread is not
# intercepted. The first context installs the hooks, the last one removes them.
_handler: ContextVar[AttentionHandler | None] = ContextVar("handler", default=None)
_hooks = ExitStack()
_contexts = 0
_lock = threading.Lock()


@contextmanager
def intercept_attention(handler: AttentionHandler) -> Iterator[None]:
    """Pass every attention of this thread to `handler`; remove the hooks on exit."""
    global _contexts
    with _lock:
        if _contexts == 0:
            _install_hooks()
        _contexts += 1
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)
        with _lock:
            _contexts -= 1
            if _contexts == 0:
                _hooks.close()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or a class another attribute; on exit its own, or the one that it inherited, is visible again."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _install_hooks() -> None:
    sdpa = _hook_sdpa(F.scaled_dot_product_attention)
    _hooks.enter_context(patched(F, "scaled_dot_product_attention", sdpa))
    # If transformers was never imported, none of its models can be running.
    if modeling := sys.modules.get("transformers.modeling_utils"):
        interface = modeling.AttentionInterface
        hooked = _hook_get_interface(interface.get_interface)
        _hooks.enter_context(patched(interface, "get_interface", hooked))


def _hand_over(attention: OriginalAttention) -> Any:
    """Pass an attention to the handler; compute it if there is none.

    The attention that the handler calls is not intercepted: transformers' sdpa runs through torch's.
    """
    handler = _handler.get()
    if handler is None:
        return attention()
    token = _handler.set(None)
    try:
        return handler(attention)
    finally:
        _handler.reset(token)


def _hook_sdpa(original: Callable) -> Callable:
    @functools.wraps(original)
    def scaled_dot_product_attention(*arguments, **settings):
        if _handler.get() is None:
            return original(*arguments, **settings)
        tensors, options = _sdpa_arguments(*arguments, **settings)

        def attend(query, key, value, mask, causal):
            return original(query, key, value, mask, is_causal=causal, **options)

        return _hand_over(OriginalAttention(attend, *tensors, Formula(options["scale"])))

    return scaled_dot_product_attention


def _sdpa_arguments(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    return (query, key, value, attn_mask, is_causal), options


def _hook_get_interface(original: Callable) -> Callable:
    """Wrap `AttentionInterface.get_interface`, by which every transformers family finds its attention function."""

    @functools.wraps(original)
    def get_interface(interface, name, default):
        function = original(interface, name, default)
        if _handler.get() is None:
            return function

        def attention_interface(module, query, key, value, attention_mask, **settings):
            is_causal = settings.get("is_causal")
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            # Eager attention never adds a causal mask of its own; the others do if the model gives them no mask.
            causal = (
                name != "eager" and attention_mask is None and bool(causal) and query.shape[2] > 1
            )

            def attend(query, key, value, mask, requested):
                # `is_causal` is passed on only if it changes: some eager functions do not take it.
                changed = settings if requested == causal else {**settings, "is_causal": requested}
                return function(module, query, key, value, mask, **changed)

            formula = Formula(
                settings.get("scaling"), settings.get("softcap"), settings.get("s_aux")
            )
            given = query, key, value, attention_mask, causal
            attention = OriginalAttention(
                attend, *given, formula, lambda output: (output.transpose(1, 2), None)
            )
            return _hand_over(attention)

        return attention_interface

    return get_interface


def hook_attn_method(module: nn.Module) -> None:
    """Intercept the `_attn` method of a replica's attention module, if its class has that of the older families."""
    original = getattr(type(module), "_attn", None)
    if original is None or list(inspect.signature(original).parameters)[:5] != _ATTN_PARAMETERS:
        return

    def _attn(query, key, value, attention_mask=None, *more, **settings):
        def attend(query, key, value, mask, causal):
            return original(module, query, key, value, mask, *more, **settings)

        return _hand_over(OriginalAttention(attend, query, key, value, attention_mask, False))

    module.__dict__["_attn"] = _attn


_ATTN_PARAMETERS = ["self", "query", "key", "value", "attention_mask"]
