"""Run functions wrapped in `torch.utils.checkpoint` without recomputation.

A checkpointed function drops its graph and runs again in the backward pass. The reentrant implementation refuses
`torch.autograd.grad`; the other one runs the function again when its attention is no longer intercepted. Without
checkpointing the result is the same. Both are intercepted below `checkpoint` itself, which modules often import by name.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def checkpointing_disabled() -> Iterator[None]:
    """Run this thread's checkpointed functions as plain functions; only one thread at a time may do so."""
    checkpoint: Any = sys.modules.get("torch.utils.checkpoint")  # if it was never imported, nothing can call it
    with ExitStack() as stack:
        if checkpoint is not None:
            reentrant = checkpoint.CheckpointFunction
            apply = functools.partial(_apply, reentrant.apply, threading.get_ident())
            stack.callback(_restore, reentrant, "apply", vars(reentrant).get("apply"))
            reentrant.apply = staticmethod(apply)
            for name in _GENERATORS:
                if original := getattr(checkpoint, name, None):
                    stack.callback(setattr, checkpoint, name, original)
                    setattr(checkpoint, name, functools.partial(_generator, original, threading.get_ident()))
        yield


_GENERATORS = [  # the first in torch 2.11, the second in 2.15
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
]


def _apply(original: Callable, thread: int, function: Callable, preserve_rng_state: bool, *arguments: Any) -> Any:
    if threading.get_ident() != thread:
        return original(function, preserve_rng_state, *arguments)
    return function(*arguments)


def _generator(original: Callable, thread: int, *arguments: Any, **keywords: Any) -> Iterator[None]:
    """Replace the generator that runs before and after a checkpointed function: only the caller's own context is entered."""
    if threading.get_ident() != thread:
        return original(*arguments, **keywords)
    given = inspect.signature(original).bind(*arguments, **keywords).arguments.get("context_fn")
    return _within_context(given)


def _within_context(context_fn: Callable | None) -> Iterator[None]:
    with ExitStack() as stack:
        if context_fn is not None:
            stack.enter_context(context_fn()[0])
        yield


def _restore(owner: Any, name: str, value: Any) -> None:
    """Restore an attribute of the class itself; one that it inherited becomes visible again."""
    if value is None:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
