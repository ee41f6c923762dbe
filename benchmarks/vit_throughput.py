"""Training throughput in images per second: batched augmentation compared with PIL in worker processes.

`python -m benchmarks.vit_throughput --out benchmarks/vit_throughput.json`: DeiT-Ti, batch 512, full augmentation, bf16 on
a GPU. Each pipeline is also timed without the model, to show which of the two is the bottleneck. Images are random.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    from jsonargparse import ArgumentParser

    from tracker.provenance import describe
    from vit.model import build
    from vit.recipe import Recipe

    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--batches", type=int, default=60, help="timed batches, after ten to warm up")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="worker processes of the PIL pipeline")
    parsed = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = Recipe(batch_size=parsed.batch_size, workers=parsed.workers)
    model = build(recipe, 10).to(device)
    rows = []
    for augment in ("batched", "workers"):
        for trained in (False, True):
            row = measure(replace(recipe, augment=augment), model if trained else None, device, parsed.batches)
            rows.append({"augment": augment, "trained": trained, **row})
            print(rows[-1], flush=True)
    environment = {**describe(model, device), "cores": os.cpu_count()}
    settings = {"batch_size": recipe.batch_size, "batches": parsed.batches, "workers": parsed.workers}
    parsed.out.write_text(json.dumps({"settings": settings, "environment": environment, "rows": rows}, indent=1) + "\n")


def measure(recipe: Any, model: Any, device: torch.device, batches: int) -> dict[str, float]:
    """Measure images per second over `batches` and, on a GPU, its utilisation."""
    import lightning

    from vit.data import Data, Split
    from vit.loaders import Batches

    count = recipe.batch_size * (batches + 10)
    pixels = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)
    split = Split(pixels, torch.randint(10, (count,)))
    data = Data(split, split[:10], [str(i) for i in range(10)], torch.full((3,), 0.5), torch.full((3,), 0.25))
    module = Batches(data, recipe)
    module.trainer = lightning.Trainer(accelerator="auto", devices=1, logger=False, enable_checkpointing=False)
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
    for _ in range(10):
        next(running)
    _wait(device)
    started, busy, timed = time.perf_counter(), [], 0
    for timed, _ in enumerate(running, 1):
        if device.type == "cuda" and timed % 10 == 0:
            query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            busy.append(
                float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 100
            )
    _wait(device)
    rate = timed * recipe.batch_size / (time.perf_counter() - started)
    return {"images_per_second": rate, **({"gpu_busy": sum(busy) / len(busy)} if busy else {})}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
