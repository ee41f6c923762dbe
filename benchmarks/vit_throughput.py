"""Training throughput of vision transformers in images per second.

`python -m benchmarks.vit_throughput --out benchmarks/vit_throughput.json`: DeiT-Ti, batch 512, full augmentation, bf16 on
a GPU. The augmentation is also timed without the model, to show which of the two is the bottleneck. Images are random.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import Clock, keep, synchronize
from checkpoints.cli import OK, reports_errors

WARM_UP = 10  # batches
SAMPLED_EVERY = 100  # milliseconds


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    from tracker.cli import Parser
    from tracker.provenance import describe, usable_device
    from vit.model import build
    from vit.recipe import Recipe

    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--batches", type=int, default=60, help="timed batches, after ten to warm up")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parsed = parser.parse_args(arguments)
    device = usable_device(parsed.device, f"--device {parsed.device}")
    recipe = Recipe(batch_size=parsed.batch_size)
    model = build(recipe, 10).to(device)
    rows = []
    for trained in (False, True):
        row = measure(recipe, model if trained else None, device, parsed.batches)
        rows.append({"trained": trained, **row})
        print(rows[-1], flush=True)
    environment = {**describe(model, device), "cores": os.cpu_count()}
    settings = {"batch_size": recipe.batch_size, "batches": parsed.batches}
    keep({"settings": settings, "environment": environment, "rows": rows}, parsed.out)
    return OK


def measure(recipe: Any, model: Any, device: torch.device, batches: int) -> dict[str, float]:
    """Measure images per second over `batches` and, on a GPU, its utilisation in as many batches after those."""
    import lightning

    from vit.data import Data, Split
    from vit.loaders import Batches

    count = recipe.batch_size * (WARM_UP + 2 * batches)
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    split = Split(pixels, torch.randint(10, (count,)))
    data = Data(split, split[:10], [str(i) for i in range(10)], torch.full((3,), 0.5), torch.full((3,), 0.25))
    module = Batches(data, recipe)
    accelerator = "cpu" if device.type == "cpu" else "auto"
    module.trainer = lightning.Trainer(accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False)
    module.trainer.training = True
    optimizer = torch.optim.AdamW(model.parameters()) if model else None

    def steps() -> Iterator[None]:
        for images, labels in module.train_dataloader():
            moved = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            images, targets = module.on_after_batch_transfer(moved, 0)
            if model and optimizer:
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = torch.nn.functional.cross_entropy(model(images), targets, label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            yield

    running = steps()
    advance(running, WARM_UP)
    rate = batches * recipe.batch_size / seconds_of(running, batches, device)
    busy = gpu_utilisation(running, batches, device) if device.type == "cuda" else None
    return {"images_per_second": rate, **({} if busy is None else {"gpu_busy": busy})}


def advance(steps: Iterator[None], count: int) -> None:
    """Run the next `count` steps."""
    if len(list(islice(steps, count))) < count:
        raise RuntimeError("too few batches to measure")


def seconds_of(steps: Iterator[None], count: int, device: torch.device) -> float:
    """Time the next `count` steps, from an idle device to an idle device."""
    clock = Clock(device)
    started = clock.now()
    advance(steps, count)
    return clock.now() - started


def gpu_utilisation(steps: Iterator[None], count: int, device: torch.device) -> float | None:
    """Return the mean utilisation of a GPU, sampled by nvidia-smi during the next `count` steps; None without samples."""
    if shutil.which("nvidia-smi") is None:
        return None
    of = [f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", f"--loop-ms={SAMPLED_EVERY}"]
    query = ["nvidia-smi", *of, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    sampler = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    try:
        advance(steps, count)
        synchronize(device)
    finally:
        sampler.terminate()
        output, _ = sampler.communicate()
    samples = [float(line) for line in output.split() if line.isdecimal()]
    return sum(samples) / len(samples) / 100 if samples else None


if __name__ == "__main__":
    sys.exit(main())
