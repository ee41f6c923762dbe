"""Write docs/architectures.md: for every architecture the path that serves it, its error, and its speed.

`python -m tests.architectures`. The errors are those that tests/zoo bounds; a test there
checks that the table lists the same architectures on the same paths.
"""

import statistics
import time
import warnings
from pathlib import Path

import torch

from tests.support.models import FAMILIES, Size, build
from tests.zoo.claims import jacobian_error
from tests.zoo.rows import seen, truth
from tracker.blocks.find import find_blocks
from tracker.jacobians.rows import Jacobians, full_sequence_jacobian
from tracker.jacobians.slicing import NotSliceable, Rows
from tracker.model.global_state import preserve_global_state
from tracker.model.inputs import batches
from tracker.model.recorder import record
from tracker.model.replica import Replica

TABLE = Path(__file__).parent.parent / "docs" / "architectures.md"
SPEED = Size(width=128, tokens=64)
HEAD = f"""# Architectures

Written by `python -m tests.architectures`. Random models are compared with gradients in the graph of one pass in float64,
on the same attention implementation.

- *Path*: "sliced" computes Jacobians from single rows, "full" from the full sequence
  ([measurements.md](measurements.md#blocks-and-jacobians)). Families on the full path are measured as accurately, only more
  slowly; the Dataset's `diagnostics_sliced` and `fallbacks` record it.
- *Error*: largest difference of a Jacobian's entries from brute force, in float64, relative to the largest entry if that is
  above 1. An error of 0 means that norms which round to float32 (RMSNorm) hide the last bits of float64.
- *Speed*: time for one block's Jacobian at one token, width {SPEED.width}, about {SPEED.tokens} tokens, float32, by
  full-sequence vector-Jacobian products, divided by the time from a single row; medians of five alternating runs on two CPU
  cores.

| architecture | path | error | speed | why not sliced |
|---|---|---|---|---|
"""


def speed(name: str) -> str:
    """How many times faster the sliced path is on the first block."""
    model, inputs = build(name, SPEED, samples=1)
    (batch,) = batches(model, inputs, None, None)
    with preserve_global_state(torch.device("cpu")):
        replica = Replica(model, find_blocks(model), torch.float32, torch.device("cpu"))
        call = record(replica, batch.arguments, batch.keywords).calls[0]
        rows = Rows(torch.tensor([0]), torch.tensor([call.x.shape[1] - 1]))
        jacobians = Jacobians(replica)
        seconds = {"sliced": [], "full": []}
        with replica.materialize(call.block):
            for _ in range(6):  # the first of each warms up, and proves the derivative
                for path, run in (
                    ("sliced", lambda: jacobians._sliced([(call, rows)])),
                    ("full", lambda: full_sequence_jacobian(call, rows, torch.float32)),
                ):
                    started = time.perf_counter()
                    try:
                        run()
                    except NotSliceable:
                        return "–"
                    seconds[path].append(time.perf_counter() - started)
    return (
        f"{statistics.median(seconds['full'][1:]) / statistics.median(seconds['sliced'][1:]):.0f} x"
    )


def main():
    """Measure every family and write the table."""
    lines = []
    for name, family in FAMILIES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ds = seen(name, "float64").ds
            sliced, error = bool(ds.diagnostics_sliced.all()), jacobian_error(ds, truth(name))
            ratio = speed(name) if sliced else "–"
        lines.append(
            f"| {name} | {'sliced' if sliced else 'full'} | {error:.0e} | {ratio} | {family.full} |"
        )
        print(lines[-1], flush=True)
    TABLE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
