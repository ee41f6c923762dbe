"""Doors into a model's attention, without touching its code.

Everything in a block but attention acts row by row, so to restrict a block to one row it is enough to stand at the
place where queries meet keys. Two doors lead there: the look-up of transformers' attention functions (`eager` included),
and `torch.nn.functional.scaled_dot_product_attention` (timm, torchvision, `nn.MultiheadAttention`, plain PyTorch). A
third, on the replica's own modules, is the `_attn` method of families older than the look-up (GPT-J, GPT-Neo).

Inside `intercept_attention(answer)` every attention of this thread is handed to

    answer(attend, query, key, value, mask, causal)

with query (B, H, m, e), key and value (B, H_kv, n, e), the mask the model made (or None), and whether the model relies
on causality by position where it gives no mask. `attend(query, key, value, mask, causal)` is the model's own attention
with its scale, soft-cap, sinks, window and so on, and `attend.formula` is as much of it as the door can see; what the
answer returns goes back into the model.
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
    """softmax(cap tanh(scale q K / cap) + mask) V, as far as a door can see: what it says is checked by its values."""

    scale: float | None = None  # None: e^-1/2
    cap: float | None = None  # of the scores
    sinks: Tensor | None = None  # one more score for each head, with no value


@dataclass(frozen=True)
class OriginalAttention:
    """A model's own attention, and its formula where the door knows one."""

    own: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Any]
    formula: Formula | None = None
    returned: Callable[[Tensor], Any] = lambda output: output  # gives (B, H, m, e) the form that the model expects

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Any:
        """What the model would have computed."""
        return self.own(query, key, value, mask, causal)


Answer = Callable[[OriginalAttention, Tensor, Tensor, Tensor, Tensor | None, bool], Any]

# The doors are process-wide while open; the answer belongs to the thread that measures, so that a model running in
# another thread passes through untouched. Whoever comes first opens them, whoever leaves last shuts them.
_answer: ContextVar[Answer | None] = ContextVar("answer", default=None)
_doors = ExitStack()
_inside = 0
_lock = threading.Lock()


@contextmanager
def intercept_attention(answer: Answer) -> Iterator[None]:
    """Hand every attention of this thread to `answer` until the block ends; restores on error."""
    global _inside
    with _lock:
        if _inside == 0:
            _open_doors()
        _inside += 1
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)
        with _lock:
            _inside -= 1
            if _inside == 0:
                _doors.close()


def _open_doors() -> None:
    attend = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _torch_door(attend)
    _doors.callback(setattr, F, "scaled_dot_product_attention", attend)
    # Where transformers was never imported, no model of it can be running.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling:
        look_up = modeling.AttentionInterface.get_interface
        modeling.AttentionInterface.get_interface = _huggingface_door(look_up)
        _doors.callback(setattr, modeling.AttentionInterface, "get_interface", look_up)


def _handed_over(answer: Answer, attend: OriginalAttention, *arguments: Any) -> Any:
    """Call the answer with the doors shut behind it: transformers' sdpa runs through torch's."""
    token = _answer.set(None)
    try:
        return answer(attend, *arguments)
    finally:
        _answer.reset(token)


def _torch_door(original: Callable) -> Callable:
    @functools.wraps(original)
    def scaled_dot_product_attention(*arguments, **settings):
        answer = _answer.get()
        if answer is None:
            return original(*arguments, **settings)
        given = _sdpa_arguments(*arguments, **settings)

        def attend(query, key, value, mask, causal):
            return original(query, key, value, mask, is_causal=causal, **given["settings"])

        return _handed_over(answer, OriginalAttention(attend, Formula(given["settings"]["scale"])), *given["tensors"])

    return scaled_dot_product_attention


def _sdpa_arguments(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    settings = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    return {"tensors": (query, key, value, attn_mask, is_causal), "settings": settings}


def _huggingface_door(look_up: Callable) -> Callable:
    """Stand in for `AttentionInterface.get_interface`, through which every family finds its attention function."""

    @functools.wraps(look_up)
    def get_interface(interface, name, default):
        function = look_up(interface, name, default)
        answer = _answer.get()
        if answer is None:
            return function

        def attention_interface(module, query, key, value, attention_mask, **settings):
            asked = settings.get("is_causal")
            causal = getattr(module, "is_causal", True) if asked is None else asked
            # Eager attention never adds a causal mask of its own; the others do where the model gives them none.
            causal = name != "eager" and attention_mask is None and bool(causal) and query.shape[2] > 1

            def attend(query, key, value, mask, now):
                # Only a changed wish is passed on: some eager functions do not know the word.
                changed = settings if now == causal else {**settings, "is_causal": now}
                return function(module, query, key, value, mask, **changed)

            formula = Formula(settings.get("scaling"), settings.get("softcap"), settings.get("s_aux"))
            door = OriginalAttention(attend, formula, lambda output: (output.transpose(1, 2), None))
            return _handed_over(answer, door, query, key, value, attention_mask, causal)

        return attention_interface

    return get_interface


def hook_attn_method(module: nn.Module) -> None:
    """Give a replica's attention module a door of its own, if its class has the older families' `_attn` method."""
    original = getattr(type(module), "_attn", None)
    if original is None or list(inspect.signature(original).parameters)[:5] != _ATTN_PARAMETERS:
        return

    def _attn(query, key, value, attention_mask=None, *more, **settings):
        def attend(query, key, value, mask, causal):
            return original(module, query, key, value, mask, *more, **settings)

        answer = _answer.get()
        if answer is None:
            return attend(query, key, value, attention_mask, False)
        return _handed_over(answer, OriginalAttention(attend), query, key, value, attention_mask, False)

    module.__dict__["_attn"] = _attn


_ATTN_PARAMETERS = ["self", "query", "key", "value", "attention_mask"]
