"""Process-wide PyTorch state during a measurement: set what replays need, and restore everything afterwards.

Functions wrapped in `torch.utils.checkpoint` run without recomputation. A checkpointed function drops its graph and runs again
in the backward pass. The reentrant implementation refuses `torch.autograd.grad`; the other one runs the function again when its
attention is no longer intercepted. Without checkpointing the result is the same. Both are intercepted below `checkpoint`
itself, which modules often import by name.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from threading import RLock, get_ident
from typing import Any

import torch

from tracker.linalg.precision import float32_products
from tracker.model.attention import patched
from tracker.model.random_numbers import preserve_random_state


@contextmanager
def checkpointing_disabled() -> Iterator[None]:
    """Run this thread's checkpointed functions as plain functions; only one thread at a time may do so."""
    # If it was never imported, nothing can call it
    checkpoint: Any = sys.modules.get("torch.utils.checkpoint")
    thread = get_ident()
    with ExitStack() as stack:
        if checkpoint is not None:
            reentrant = checkpoint.CheckpointFunction
            apply = staticmethod(partial(_apply, reentrant.apply, thread))
            stack.enter_context(patched(reentrant, "apply", apply))
            for name in _GENERATORS:
                if original := getattr(checkpoint, name, None):
                    generator = partial(_generator, original, thread)
                    stack.enter_context(patched(checkpoint, name, generator))
        yield


_GENERATORS = [  # the first in torch 2.11, the second in 2.15
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
]


def _apply(
    original: Callable, thread: int, function: Callable, preserve_rng_state: bool, *arguments: Any
) -> Any:
    if get_ident() != thread:
        return original(function, preserve_rng_state, *arguments)
    return function(*arguments)


def _generator(original: Callable, thread: int, *arguments: Any, **keywords: Any) -> Iterator[None]:
    """Replace the generator that runs before and after a checkpointed function: only the caller's own context is entered."""
    if get_ident() != thread:
        yield from original(*arguments, **keywords)
        return
    factory = inspect.signature(original).bind(*arguments, **keywords).arguments.get("context_fn")
    with nullcontext() if factory is None else factory()[0]:
        yield


_ONE_AT_A_TIME = RLock()


@contextmanager
def preserve_global_state(device: torch.device) -> Iterator[None]:
    """Turn off gradients, inference mode, autocast, fused paths and compilation; restore them and the random state on exit.

    Most of this state belongs to the process, not to a thread: two threads that set and restore the same switches could
    leave them set, so a lock lets one measurement run at a time.
    """
    fused = torch.backends.mha
    with (
        _ONE_AT_A_TIME,
        ExitStack() as stack,
        float32_products("ieee"),
        checkpointing_disabled(),
        # Else nothing is compiled, and importing it costs seconds
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else nullcontext(),
        preserve_random_state(device),
        torch.inference_mode(False),
        _inference_mode_as_no_grad(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        # The fused encoder layer never calls attention
        stack.callback(fused.set_fastpath_enabled, fused.get_fastpath_enabled())
        fused.set_fastpath_enabled(False)
        yield


@contextmanager
def _inference_mode_as_no_grad() -> Iterator[None]:
    """Let this thread's uses of `torch.inference_mode`, which may decorate a forward, turn off gradients and no more.

    The values are the same. But tensors made in inference mode have no version counter, and no graph may save them.
    """
    thread, enter = get_ident(), torch.inference_mode.__enter__

    def enter_no_grad(self: Any) -> None:
        if get_ident() != thread:
            return enter(self)
        # What `inference_mode.__exit__` ends.
        self._inference_mode_context = torch.set_grad_enabled(not self.mode)

    with patched(torch.inference_mode, "__enter__", enter_no_grad):
        yield
