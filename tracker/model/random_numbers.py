"""The random numbers that a forward pass draws: the same in every pass over the same inputs.

A model may draw random numbers in eval mode too: the masks of a masked autoencoder, the noise and the time steps of a diffusion
model. Before every pass all generators that it may draw from are seeded from a digest of its inputs: those of the process and
those that the model's modules hold. So the numbers depend neither on what was drawn before nor on the process that measures.

`noise_like` is noise for checks by forward passes: added to a value, it changes whatever depends on that value.
"""

import copy
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tracker.linalg.transfer import SEED
from tracker.provenance import digest

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def seed_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """Return a seed of 32 bits from the tensors, numbers and text among a forward pass's inputs."""
    leaves = tree_leaves((list(arguments), dict(keywords)))
    # Other objects have no contents to hash, and their names may contain addresses.
    return int(
        digest([leaf for leaf in leaves if isinstance(leaf, (Tensor, str, bool, int, float))])[:8],
        16,
    )


def copy_generator(generator: Generator) -> Generator:
    """Return a generator that draws the same numbers."""
    if not isinstance(generator, torch.Generator):
        return copy.deepcopy(generator)
    copied = torch.Generator(generator.device)
    copied.set_state(generator.get_state())
    return copied


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
        self._seed, self._seeded = seed, self.states()

    def drawn_seed(self) -> int | None:
        """Return the seed if a random number was drawn since the generators were seeded, else None."""
        return self._seed if self.states() != self._seeded else None

    def states(self) -> list[bytes]:
        """Return the states of all generators."""
        tensors = [torch.get_rng_state()]
        tensors += [get(*place) for get, _, place in _accelerator_generators(self._device)]
        tensors += [
            generator.get_state()
            for generator in self.held
            if isinstance(generator, torch.Generator)
        ]
        others = [
            generator for generator in self.held if not isinstance(generator, torch.Generator)
        ]
        return [
            *(state.cpu().numpy().tobytes() for state in tensors),
            *map(pickle.dumps, [random.getstate(), np.random.get_state(), *others]),
        ]


@contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore on exit the process's random states: Python's, NumPy's, torch's of the CPU and of the accelerators of one type.

    The type is that of `device`; if that is the CPU, the machine's, whose random state a training may be using.
    """
    if device.type != "cpu":
        torch.empty(0, device=device)  # initializes its generators
    of_accelerators = [
        (set_, place, get(*place)) for get, set_, place in _accelerator_generators(device)
    ]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            for set_state, place, state in of_accelerators:
                set_state(state, *place)


def _accelerator_generators(device: torch.device) -> list[tuple[Any, Any, tuple[int, ...]]]:
    """Return, for each accelerator, the functions that get and set its random state, and how they name it; none if nothing has
    used them yet.
    """
    accelerator = (
        device
        if device.type != "cpu"
        else torch.accelerator.current_accelerator(check_available=True)
    )
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    if accelerator is None or not getattr(module, "is_initialized", lambda: True)():
        return []
    # MPS has one device, which its functions do not name.
    places = [()] if accelerator.type == "mps" else [(i,) for i in range(module.device_count())]
    return [(module.get_rng_state, module.set_rng_state, place) for place in places]


def noise_like(values: Tensor) -> Tensor:
    """Return noise of the size of these values (1 if they are all zero), the same at every call with the same shape."""
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype).to(values.device)
    return noise * (1 + values.square().mean().sqrt())
