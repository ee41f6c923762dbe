"""Time and memory to measure a checkpoint larger than memory: `python -m benchmarks.streaming --shape 2.8b`.

A checkpoint with random weights is written in the published dtype. It is measured in fresh processes: streamed, as by the walk,
with its weights left in their files; and with all weights in memory, on a GPU in that of the GPU.
"""

import copy
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracker.common.text import size

STREAMED, IN_MEMORY = "streamed", "in memory"
K = 10  # top singular vectors
INTERVAL = 0.01  # seconds between samples of the memory in use


@dataclass
class Streaming:
    """Compare time and memory of a measurement with weights streamed from files and with weights in memory.

    Args:
        shape: a Pythia size from 14m to 12b.
        blocks: number of blocks. Default: all of the shape.
        tokens: length of each prompt.
        prompts: number of prompts.
        memory_budget: bytes for the streamed measurement; the other has the default of `tracker.measure`.
        device: cpu, cuda, cuda:1 and so on.
        out: write the result to this JSON file.
    """

    shape: str = "2.8b"
    blocks: int | None = None
    tokens: int = 32
    prompts: int = 2
    memory_budget: int = 1 << 30
    device: str = "cpu"
    out: Path | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import parsed

    settings = parsed(Streaming, "benchmarks.streaming", arguments)
    from benchmarks.machine import save

    result = streaming(settings)
    print(table(result))
    save(result, settings.out)
    return 0


def streaming(settings: Streaming) -> dict[str, Any]:
    """Measure in both ways, each in a fresh process."""
    from benchmarks import machine

    environment = machine.environment(settings.device)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        weights = machine.alone(write_checkpoint, settings, place)
        ways = {way: machine.alone(measure, settings, place, way) for way in (STREAMED, IN_MEMORY)}
    reference = ways[IN_MEMORY]["values"]
    for way in ways.values():
        way["error"] = float(abs(way.pop("values") - reference).to_array().max(skipna=False))
    return {
        "settings": machine.settings_of(settings),
        "environment": environment,
        "weights_bytes": weights,
        "ways": ways,
    }


def write_checkpoint(settings: Streaming, directory: Path) -> int:
    """Write random weights; return their size in bytes."""
    from benchmarks import shapes

    model: Any = shapes.model(
        settings.shape, settings.blocks, "cpu", vocabulary=50304, weights="float16"
    )
    model.save_pretrained(directory, max_shard_size="2GB")
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def measure(settings: Streaming, place: Path, way: str) -> dict[str, Any]:
    """Load, fingerprint and measure; anonymous memory is counted above that of the imported libraries."""
    import torch
    import transformers  # noqa: F401
    import xarray  # noqa: F401

    import tracker
    from benchmarks import machine, shapes
    from checkpoints import integrity
    from checkpoints.load import load_model
    from tracker.measures.settings import MEMORY_BUDGET

    before, seen, done = machine.status("RssAnon"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL):
            seen[0] = max(seen[0], machine.status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    model: Any = load_model(place)
    integrity.fingerprint(model.state_dict().items())
    if way == IN_MEMORY:
        model = copy.deepcopy(model).to(settings.device)
    budget = settings.memory_budget if way == STREAMED else MEMORY_BUDGET
    dataset = tracker.measure(
        model,
        shapes.inputs(settings.shape, settings.tokens, settings.prompts),
        k=K,
        device=settings.device,
        measures="coupling",
        memory_budget=budget,
    )
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    peak = getattr(
        torch.get_device_module(settings.device), "max_memory_allocated", lambda device: 0
    )
    return {
        "seconds": seconds,
        "anonymous_bytes": seen[0] - before,
        "device_bytes": peak(settings.device),
        "values": dataset[["miscoupling", "singular_value"]],
    }


def table(result: dict[str, Any]) -> str:
    """Format the result for a terminal: a column for each way."""
    import pandas as pd

    ways = pd.DataFrame(result["ways"]).to_string(float_format="{:.4g}".format)
    return f"{size(result['weights_bytes'])} of weights\n{ways}"


if __name__ == "__main__":
    sys.exit(main())
