"""The random numbers that a forward pass draws: the same in every pass over the same inputs.

A model may draw random numbers in eval mode too: the masks of a masked autoencoder, the noise and the time steps of a diffusion
model. Before every pass all generators that it may draw from are seeded from a digest of its inputs: those of the process and
those that the model's modules hold. So the numbers depend neither on what was drawn before nor on the process that measures.

`noise_like` is noise for checks by forward passes: added to a value, it changes whatever depends on that value.
"""

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tracker.linalg.transfer import SEED
from tracker.provenance import digest

CPU = torch.device("cpu")
DRAWS = 150  # seeds that a call is tried with: they miss what happens in 5 % of calls with a probability of 0.0005
Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def seed_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """Return a seed of 32 bits from the tensors, numbers and text among a forward pass's inputs."""
    leaves = tree_leaves((list(arguments), dict(keywords)))
    # Other objects have no contents to hash, and their names may contain addresses.
    return int(
        digest([leaf for leaf in leaves if isinstance(leaf, (Tensor, str, bool, int, float))])[:8],
        16,
    )


class Generators:
    """The process's generators, and those that the modules of a replica hold.

    Attributes:
        held: the replica's own copies of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.held: list[Generator] = []
        self._device = device
        self._seed = 0
        self._seeded: list[bytes] = []  # the states after seeding

    def seed(self, seed: int) -> None:
        """Seed all generators. Call inside `preserve_random_state`."""
        self._set_seed(seed)
        self._seed, self._seeded = seed, self.states()

    def _set_seed(self, seed: int) -> None:
        if _accelerator_generators(self._device):
            torch.manual_seed(seed)
        else:  # it would seed an accelerator that nothing has used yet, later, and keep a stack trace
            torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        for generator in self.held:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            else:
                generator.seed(seed)

    def drawn_seed(self) -> int | None:
        """Return the seed if a random number was drawn since the generators were seeded, else None."""
        return self._seed if self.states() != self._seeded else None

    def states(self) -> list[bytes]:
        """Return the states of all generators."""
        return [
            state.cpu().numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)
            for state in (get() for get, _ in _states(self._device, self.held))
        ]

    def matter(self, call: Callable[[], Tensor]) -> bool:
        """Whether a call returns something else when other random numbers are drawn. The generators stay as they are."""

        def output(seed: int) -> Tensor:
            self._set_seed(seed)
            return call()

        with preserve_random_state(self._device, self.held):
            first = output(SEED)
            return any(not torch.equal(output(SEED + i), first) for i in range(1, DRAWS))


@contextmanager
def preserve_random_state(
    device: torch.device = CPU, held: Sequence[Generator] = ()
) -> Iterator[None]:
    """Restore on exit the process's random states: Python's, NumPy's, torch's of the CPU and of the accelerators of one type.

    The type is that of `device`; if that is the CPU, the machine's, whose random state a training may be using.

    Args:
        held: other generators whose states are restored.
    """
    if device.type != "cpu":
        torch.empty(0, device=device)  # initializes its generators
    states = [(get(), set_) for get, set_ in _states(device, held)]
    try:
        yield
    finally:
        for state, set_ in states:
            set_(state)


def _states(device: torch.device, held: Sequence[Generator]) -> Iterator[tuple[Any, Any]]:
    """Yield, for each generator of the process and each of these, the functions that get and set its state."""
    yield from _accelerator_generators(device)
    generator: Any
    for generator in (torch.default_generator, random, np.random, *held):
        if isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            yield partial(getattr, bits, "state"), partial(setattr, bits, "state")
        elif hasattr(generator, "getstate"):  # as Python's
            yield generator.getstate, generator.setstate
        else:
            yield generator.get_state, generator.set_state


def _accelerator_generators(device: torch.device) -> list[tuple[Any, Any]]:
    """Return, for each accelerator, the functions that get and set its random state; none if nothing has used them yet."""
    accelerator = (
        device
        if device.type != "cpu"
        else torch.accelerator.current_accelerator(check_available=True)
    )
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    if accelerator is None or not getattr(module, "is_initialized", lambda: True)():
        return []
    # MPS has one device, which its functions do not name.
    places = (
        [{}] if accelerator.type == "mps" else [{"device": i} for i in range(module.device_count())]
    )
    return [
        (partial(module.get_rng_state, **p), partial(module.set_rng_state, **p)) for p in places
    ]


def noise_like(values: Tensor) -> Tensor:
    """Return noise of the size of these values (1 if they are all zero), the same at every call with the same shape."""
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype).to(values.device)
    return noise * (1 + values.square().mean().sqrt())
