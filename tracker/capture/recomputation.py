"""Activation checkpointing passed through: what `torch.utils.checkpoint` wraps runs plainly.

A checkpointed function forgets its graph and runs again in the backward pass. One way of it refuses
`torch.autograd.grad`, the other runs the function again where a measurement no longer stands at its attention. The result
is the same without it. Both ways are intercepted below `checkpoint` itself, which modules often import by name.
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
    """Run checkpointed functions of this thread plainly until the block ends; one thread at a time may do so."""
    checkpoint: Any = sys.modules.get("torch.utils.checkpoint")  # where nobody imported it, nobody can call it
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


_GENERATORS = [  # the first is that of torch 2.11, the second of 2.15
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
]


def _apply(original: Callable, thread: int, function: Callable, preserve_rng_state: bool, *arguments: Any) -> Any:
    if threading.get_ident() != thread:
        return original(function, preserve_rng_state, *arguments)
    return function(*arguments)


def _generator(original: Callable, thread: int, *arguments: Any, **keywords: Any) -> Iterator[None]:
    """What runs before and after the checkpointed function: nothing but the context that the caller gave."""
    if threading.get_ident() != thread:
        return original(*arguments, **keywords)
    given = inspect.signature(original).bind(*arguments, **keywords).arguments.get("context_fn")
    return _within(given)


def _within(context_fn: Callable | None) -> Iterator[None]:
    with ExitStack() as stack:
        if context_fn is not None:
            stack.enter_context(context_fn()[0])
        yield


def _restore(owner: Any, name: str, value: Any) -> None:
    """Put back what the class itself had; what it inherited reappears."""
    if value is None:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
