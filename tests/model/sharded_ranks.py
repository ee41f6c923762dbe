"""One of the ranks that measure a sharded model: `python -m tests.model.sharded_ranks DIRECTORY`.

It plants one error after another on rank 1, and writes to DIRECTORY what each measurement returned or raised on this rank, and
the memory budgets of its attempts.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.models import Size, language, tokens
from tracker import measurement
from tracker.blocks import prepare
from tracker.blocks.find import find_blocks
from tracker.jacobians.rows import Jacobians
from tracker.measures.dataset import Sample
from tracker.measures.options import settings_from
from tracker.model import weights
from tracker.model.inputs import batches
from tracker.model.replica import Replica

SETTINGS = settings_from(
    {"k": 2, "measures": "coupling", "dtype": "float64", "memory_budget": 1 << 20}, "test"
)
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"


def make():
    """Return the model that the ranks shard."""
    torch.manual_seed(0)
    return language("GPTNeoXForCausalLM")(Size(width=16, depth=3, tokens=6))


def measure(model) -> list[float]:
    """Return the singular values of all blocks."""
    calls = batches(model, tokens(2, 6), None, None)
    measure = measurement.measure_with_less_memory
    samples = measure(model, find_blocks(model), calls, SETTINGS, torch.device("cpu"))
    return np.array([sample.values["singular_value"] for sample in samples]).ravel().tolist()


def failing(owner, name, error: Exception, after: int = 0, times: int = 1):
    """Plant an error in some calls of a function, on rank 1."""
    original, calls = getattr(owner, name), [0]

    def planted(*arguments, **keywords):
        calls[0] += 1
        if torch.distributed.get_rank() == 1 and after < calls[0] <= after + times:
            raise error
        return original(*arguments, **keywords)

    return patch.object(owner, name, planted)


def reading_more():
    """Let rank 1 read the weights of a block once more than the other rank."""
    original = Replica.materialize

    def planted(replica, module, *arguments, **keywords):
        if torch.distributed.get_rank() == 1 and module is replica.blocks[1]:
            with original(replica, replica.blocks[0]):
                pass
        return original(replica, module, *arguments, **keywords)

    return patch.object(Replica, "materialize", planted)


CASES = {
    "nothing": nullcontext,
    "before a gather": lambda: failing(prepare, "noticing_writes", ValueError("planted")),
    "error": lambda: failing(Jacobians, "__call__", RuntimeError("planted"), after=1),
    "not finite": lambda: failing(Jacobians, "__call__", FloatingPointError("planted"), after=1),
    "memory": lambda: failing(Jacobians, "__call__", torch.OutOfMemoryError("planted"), after=1),
    "memory of a gather": lambda: failing(weights, "_reserve", RuntimeError(NO_MEMORY), after=30),
    "memory, always": lambda: failing(weights, "_reserve", RuntimeError(NO_MEMORY), times=1000),
    "after the last gather": lambda: failing(Sample, "add_token", ValueError("planted")),
    "another path": reading_more,
    "mistake": lambda: failing(Jacobians, "__call__", TypeError("planted"), after=1),
    "nothing, again": nullcontext,
}


def main():
    directory, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mesh, model = init_device_mesh("cpu", (2,)), make()
    for layer in model.gpt_neox.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    results, real = {}, measurement.measure_samples
    for case, plant in CASES.items():
        budgets = []

        def recording(model, blocks, calls, settings, device, budgets=budgets):
            budgets.append(settings.memory_budget)
            return real(model, blocks, calls, settings, device)

        with plant(), patch.object(measurement, "measure_samples", recording):
            try:
                found = measure(model)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        results[case] = {"found": found, "budgets": budgets}
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
