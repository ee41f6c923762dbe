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
from statistics import median
from typing import Any

STREAMED, IN_MEMORY = "streamed", "in memory"
INTERVAL = 0.01  # seconds between samples of the memory in use


@dataclass
class Streaming:
    """Compare time and memory of a measurement with weights streamed from files and with weights in memory.

    Args:
        shape: a Pythia size from 14m to 12b.
        blocks: number of blocks. Default: all of the shape.
        tokens: length of each prompt.
        prompts: number of prompts.
        k: number of top singular vectors.
        memory_budget: bytes for the streamed measurement; the other has the default of `tracker.measure`.
        repeats: number of runs of each, in turn; medians are reported.
        device: cpu, cuda, cuda:1 and so on.
        out: write the result to this JSON file.
    """

    shape: str = "2.8b"
    blocks: int | None = None
    tokens: int = 32
    prompts: int = 2
    k: int = 10
    memory_budget: int = 1 << 30
    repeats: int = 1
    device: str = "cpu"
    out: Path | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.common.parser import parsed

    settings = parsed(Streaming, "benchmarks.streaming", arguments)
    from benchmarks.machine import keep

    result = streaming(settings)
    print(table(result))
    keep(result, settings.out)
    return 0


def streaming(settings: Streaming) -> dict[str, Any]:
    """Measure in both ways in turn, each in a fresh process."""
    from benchmarks import machine

    environment = machine.environment(settings.device)
    with tempfile.TemporaryDirectory() as directory:
        weights = machine.alone(write_checkpoint, settings, Path(directory))
        runs: dict[str, list[dict[str, Any]]] = {STREAMED: [], IN_MEMORY: []}
        for repeat in range(settings.repeats):
            for name, made in runs.items():
                print(
                    f"run {repeat + 1} of {settings.repeats}: {name}", file=sys.stderr, flush=True
                )
                made.append(machine.alone(measure, settings, Path(directory), name))
    values = {name: made[0].pop("values") for name, made in runs.items()}
    reference = values[IN_MEMORY]
    return {
        "settings": machine.settings_of(settings),
        "environment": environment,
        "weights_bytes": weights,
        "ways": {
            name: {
                "seconds": median(run["seconds"] for run in made),
                "anonymous_bytes": max(run["anonymous_bytes"] for run in made),
                "device_bytes": max(run["device_bytes"] for run in made),
                "error": max(abs(a - b) for a, b in zip(values[name], reference, strict=True)),
            }
            for name, made in runs.items()
        },
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

    inputs = shapes.inputs(settings.shape, settings.tokens, settings.prompts)
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
        inputs,
        k=settings.k,
        device=settings.device,
        measures="coupling",
        memory_budget=budget,
    )
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    values = [
        float(v) for name in ("miscoupling", "singular_value") for v in dataset[name].values.ravel()
    ]
    peak = getattr(
        torch.get_device_module(settings.device), "max_memory_allocated", lambda device: 0
    )
    return {
        "seconds": seconds,
        "anonymous_bytes": seen[0] - before,
        "device_bytes": peak(settings.device),
        "values": values,
    }


def table(result: dict[str, Any]) -> str:
    """Format the result for a terminal."""
    settings, ways = result["settings"], result["ways"]
    lines = [
        f"{settings['shape']}: {result['weights_bytes'] / 1e9:.2f} GB of weights, {settings['prompts']} prompts of "
        f"{settings['tokens']} tokens, K = {settings['k']}, {settings['device']}, "
        f"{settings['memory_budget'] / 1e9:.2f} GB memory budget",
        f"{'':24}{'seconds':>9}{'anonymous, GB':>15}{'device, GB':>12}{'difference':>12}",
    ]
    for name, way in ways.items():
        host, device = way["anonymous_bytes"] / 1e9, way["device_bytes"] / 1e9
        lines.append(
            f"{name:24}{way['seconds']:9.1f}{host:15.2f}{device:12.2f}{way['error']:12.1e}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
