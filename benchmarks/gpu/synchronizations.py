"""Count where the host waits for the device: `python -m benchmarks.gpu.synchronizations --out FILE`.

`torch.cuda.set_sync_debug_mode` warns at every synchronizing call; the warnings are counted by the line of this project
that made the call. Elsewhere than on CUDA there are none.
"""

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.arguments import parse

ROOT = Path(__file__).parents[2]
SYNCHRONIZING = "synchronizing CUDA operation"  # in the text of the warning
LINES = 40  # that are listed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result."""
    from benchmarks import machine, shapes
    from tracker import measure

    given = parse("benchmarks.gpu.synchronizations", __doc__, arguments)
    cases = {
        "deit-ti, 64 images": ("deit-ti", None, 64, 10),
        "410m, 4 blocks": ("410m", 4, 1, 50),
    }
    if given.small:
        cases = {"deit-ti, 2 images": ("deit-ti", 1, 2, 5)}
    result: dict[str, Any] = {"environment": machine.environment(given.device)}
    for name, (shape, blocks, prompts, k) in cases.items():
        model, inputs = shapes.model(shape, blocks, given.device), shapes.inputs(shape, 128, prompts)

        def run(model: Any = model, inputs: Any = inputs, shape: str = shape, k: int = k) -> Any:
            options = {"blocks": shapes.blocks(model), "tokens": [shapes.position(shape)], "final_norm": "exclude"}
            return measure(model, inputs, k=k, measures="coupling", device=given.device, **options)

        run()  # to warm up
        started = machine.Clock(given.device).now()
        run()
        seconds = machine.Clock(given.device).now() - started
        result[name] = {"seconds": seconds, **count(run, given.device)}
        machine.save(result, given.out)
    return 0


def count(run: Callable[[], Any], device: str) -> dict[str, Any]:
    """Return the number of synchronizing calls of a run, in all and of the lines with the most."""
    import torch

    lines: Counter[str] = Counter()
    with warnings.catch_warnings(), _noting(lines):
        warnings.simplefilter("always")
        if device.startswith("cuda"):
            torch.cuda.set_sync_debug_mode("warn")
        started = time.perf_counter()
        try:
            run()
        finally:
            if device.startswith("cuda"):
                torch.cuda.set_sync_debug_mode("default")
    return {
        "synchronizations": lines.total(),
        "seconds_while_counting": time.perf_counter() - started,
        "lines": dict(lines.most_common(LINES)),
    }


@contextmanager
def _noting(lines: "Counter[str]") -> Iterator[None]:
    """Count warnings of synchronizing calls by line, in place of showing them."""
    shown = warnings.showwarning

    def note(message: Warning | str, *others: Any, **options: Any) -> None:
        if SYNCHRONIZING in str(message):
            lines[_line(sys._getframe(1))] += 1
        else:
            shown(message, *others, **options)

    warnings.showwarning = note
    try:
        yield
    finally:
        warnings.showwarning = shown


def _line(frame: FrameType | None) -> str:
    """Return the innermost line in this project's packages."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in ("tracker", "vit"):
            return f"{file.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


if __name__ == "__main__":
    sys.exit(main())
