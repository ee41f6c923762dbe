"""Process-wide PyTorch state during a measurement: set what replays need, and restore everything afterwards."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock

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
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
