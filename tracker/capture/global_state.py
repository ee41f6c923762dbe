"""Process-wide PyTorch state during a measurement: set what replays need, and restore everything afterwards."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock, get_ident
from typing import Any

import torch

from tracker.capture.activation_checkpointing import checkpointing_disabled
from tracker.capture.random_numbers import preserve_random_state
from tracker.linalg.precision import float32_products

_ONE_AT_A_TIME = RLock()


@contextmanager
def preserve_global_state(device: torch.device) -> Iterator[None]:
    """Turn off gradients, inference mode, autocast, fused paths and compilation; restore them and the random state on exit.

    Most of this state belongs to the process, not to a thread: two threads that set and restore the same switches could
    leave them set, so a lock lets one measurement run at a time.
    """
    with _ONE_AT_A_TIME, ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        stack.enter_context(float32_products("ieee"))
        stack.enter_context(checkpointing_disabled())
        torch.backends.mha.set_fastpath_enabled(False)  # the fused encoder layer never calls attention
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it costs seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(preserve_random_state(device))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_inference_mode_as_no_grad())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
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

    torch.inference_mode.__enter__ = enter_no_grad
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = enter
