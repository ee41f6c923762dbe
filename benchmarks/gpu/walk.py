"""Walk over checkpoints on the device and on the CPU: `python -m benchmarks.gpu.walk --out FILE`.

A suite of nano's size is trained for a few steps and measured by `python -m tracker.pythia`. Two checkpoints are also
measured on the CPU, and the results compared.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.arguments import Given, parse
from checkpoints import nano

COMPARED = ("miscoupling", "offdiag_normalized", "singular_value", "lss", "expodistance")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result."""
    given = parse("benchmarks.gpu.walk", __doc__, arguments)
    recipe = replace(nano.Recipe(), characters=1_500_000, steps=(0, 1, 2, 4, 8, 16, 32))
    if given.small:
        recipe = replace(
            recipe, characters=120_000, layers=2, width=32, vocabulary=320, context=64, length=32, steps=(0, 2)
        )
    compared = (0, recipe.steps[-1])
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TRACKER_CACHE"] = directory
        os.environ["HF_HUB_CACHE"] = str(nano.cache_dir(recipe=recipe))  # read when the hub's client is imported
        from benchmarks.machine import environment, save

        result: dict[str, Any] = {"environment": environment(given.device)}
        started = time.perf_counter()
        nano.train(recipe=recipe)
        result["training"] = time.perf_counter() - started
        result["seconds"], units = walk(Path(directory) / "device", given, recipe.steps)
        result["of_a_checkpoint"] = {step: unit["seconds"] for step, unit in units.items()}
        result["weights_kept"] = next(iter(units.values()))["weights_kept"]
        save(result, given.out)
        on_cpu = replace(given, device="cpu")
        result["seconds_on_cpu"], expected = walk(Path(directory) / "cpu", on_cpu, compared)
        result["differences"] = {
            name: max(_difference(units[step][name], unit[name]) for step, unit in expected.items())
            for name in COMPARED
        }
    save(result, given.out)
    return 0


def walk(out: Path, given: Given, steps: Sequence[int]) -> tuple[float, dict[int, dict[str, Any]]]:
    """Walk over the suite; return the seconds and what is compared of each unit.

    Raises:
        RuntimeError: if the walk fails.
    """
    from tracker import pythia
    from tracker.store.results import Store

    prompts = out.with_suffix(".txt")
    prompts.write_text("import os\nThe function raises\nfor name in sorted(names):\\n    print(\n")
    options = ["--model", nano.REPO, "--steps", ",".join(map(str, steps)), "--prompts", str(prompts)]
    options += ["--k", "4" if given.small else "10", "--device", given.device, "--out", str(out), "--loggers="]
    started = time.perf_counter()
    if status := pythia.main(options):
        raise RuntimeError(f"the walk on {given.device} ended with status {status}")
    taken = time.perf_counter() - started
    store, units = Store(out), {}
    for step in store.steps():
        unit = store.read(step)
        units[step] = {name: unit[name].values for name in COMPARED}
        units[step] |= {name: unit.attrs[name] for name in ("seconds", "weights_kept")}
    return taken, units


def _difference(a: Any, b: Any) -> float:
    """Return the largest difference, relative to the largest value."""
    import numpy as np

    return float(np.nanmax(abs(a - b)) / max(1.0, np.nanmax(abs(b))))


if __name__ == "__main__":
    sys.exit(main())
