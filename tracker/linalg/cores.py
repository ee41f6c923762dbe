"""Functions of batches on the CPU's cores: LAPACK does not share small matrices among cores well."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Part = TypeVar("Part")
Result = TypeVar("Result")


def map_on_cores(
    function: Callable[[Part], Result],
    parts: Sequence[Part],
    done: Callable[[Part], None] = lambda _: None,
) -> list[Result]:
    """Map a function over parts in parallel, the CPU's cores divided among them.

    Args:
        done: called with each part, in their order, once it and those before it are finished.
    """

    def collected(results: Iterable[Result]) -> list[Result]:
        found = []
        for result, part in zip(results, parts, strict=True):
            found.append(result)
            done(part)
        return found

    cores = torch.get_num_threads()
    if len(parts) == 1 or cores == 1:
        return collected(map(function, parts))
    at_once = min(len(parts), cores)
    try:
        with ThreadPoolExecutor(
            # Each thread has a number of its own: without this one it would use all cores.
            at_once,
            initializer=torch.set_num_threads,
            initargs=(cores // at_once,),
        ) as pool:
            return collected(pool.map(function, parts))
    finally:
        torch.set_num_threads(cores)


def batch_on_cores(
    function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Apply a function of CPU tensors that share a batch axis, the first, to one part of the batch per core."""
    parts = list(zip(*(t.chunk(torch.get_num_threads()) for t in tensors), strict=True))
    results = map_on_cores(lambda part: function(*part), parts)
    return tuple(torch.cat(result) for result in zip(*results, strict=True))
