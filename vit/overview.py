"""The cells of a grid: what training them would take, and their states and the time that is left while they train."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from statistics import mean
from typing import TYPE_CHECKING

from tqdm import tqdm

from tracker.common.text import duration, entry, size
from vit.cells import is_done, read
from vit.recipe import Recipe

if TYPE_CHECKING:
    from vit.training import Trial

SECONDS = 2.0  # between two looks at the cells


def costs(missing: Sequence[Recipe], trial: "Trial", images: int, jobs: int | None) -> str:
    """Return what training the missing cells would take, in lines.

    Args:
        trial: of one of these cells.
        images: number of training images.
        jobs: number of cells that are trained at the same time; None if only Ray knows.
    """
    together = min(jobs or 1, len(missing))
    seconds = [trial.seconds(cell, images) for cell in missing]
    total = ceil(len(missing) / together) * mean(seconds)
    at_once = f"{together} at a time, if they do not slow each other down" if jobs else "one at a time"
    kept = f"{size(len(missing) * trial.checkpoint)} (last.ckpt)" if missing[0].keep_checkpoint else "none"
    lines = [
        ("per cell", f"about {duration(max(seconds))}"),
        ("in all", f"about {duration(total)} with {at_once}"),
        ("memory", f"about {size(trial.memory)} per cell, {size(trial.memory * together)} at once"),
        ("checkpoints", f"{size(trial.checkpoint)} per cell; kept after training: {kept}"),
        ("timed", f"a few steps, a test and two measurements of {missing[0].cell}"),
    ]
    return "\n".join(entry(*line) for line in lines)


def state_of(recipe: Recipe) -> str:
    """Return a cell's state from its directory: accuracy, reason of a failure, or finished epochs."""
    result = read(recipe.directory, "result")
    if result:
        return f"{result['accuracy']:.4f}" if result["status"] == "finished" else f"diverged: {result['reason']}"
    if failure := read(recipe.directory, "failed"):
        return f"crashed: {failure['reason']}"
    history = read(recipe.directory, "history")
    return f"{len(history)}/{recipe.epochs}" if history else "not started"


def table(recipes: Sequence[Recipe]) -> str:
    """Return the grid in lines: the test accuracy (a mean over seeds) of finished cells, the state of the others."""
    rates, decays = (sorted({getattr(r, name) for r in recipes}) for name in ("drop_path", "weight_decay"))
    rows = [["", *(f"{rate:g}" for rate in rates)]]
    for decay in decays:
        cells = ([r for r in recipes if (r.weight_decay, r.drop_path) == (decay, rate)] for rate in rates)
        rows.append([f"{decay:g}", *map(_cell_text, cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    title = "test accuracy, or finished epochs; rows: weight decay, columns: stochastic depth"
    return "\n".join([title, *lines])


def _cell_text(seeds: Sequence[Recipe]) -> str:
    states = [state_of(recipe).partition(":")[0] for recipe in seeds]
    try:
        return f"{mean(map(float, states)):.4f}"
    except ValueError:  # some seed has not finished
        return " ".join("·" if state == "not started" else state for state in states)


class Forecast:
    """The time that a grid takes, from the first steps of its cells on (`vit.pace`).

    Args:
        missing: the cells to train.
        jobs: number of cells that are trained at the same time; None: as many as are seen to be.
    """

    def __init__(self, missing: Sequence[Recipe], jobs: int | None):
        self.missing, self.jobs = missing, jobs
        self.started = time.time()
        self.whole: float | None = None  # seconds of a cell
        self.together = jobs or 1

    def left(self) -> float | None:
        """Return the seconds until the last cell is trained; None if nothing is known yet."""
        waiting = [
            cell for cell in self.missing if not is_done(cell.directory) and read(cell.directory, "failed") is None
        ]
        paces = {cell.cell: read(cell.directory, "pace") for cell in waiting}
        running = {name: pace for name, pace in paces.items() if pace and pace["written"] >= self.started}
        if running:
            self.whole = mean(pace["whole"] for pace in running.values())
            self.together = self.jobs or max(self.together, len(running))
        if self.whole is None:
            return None
        now = time.time()
        seconds = [max(pace["left"] - (now - pace["written"]), 0.0) for pace in running.values()]
        for cell in waiting:
            if cell.cell not in running:
                seconds.append(self.whole * (1 - len(read(cell.directory, "history") or ()) / cell.epochs))
        return max(sum(seconds) / min(self.together, len(seconds)), *seconds) if seconds else 0.0

    def cost(self) -> str | None:
        """Return in words what the grid takes, once steps have been timed."""
        left = self.left()
        if left is None or self.whole is None:
            return None
        together = min(self.together, len(self.missing))
        return (
            f"about {duration(self.whole)} per cell and {duration(left)} in all, {together} at a time, from the first steps; "
            "Ctrl-C stops, the same command continues"
        )


@contextmanager
def shown(recipes: Sequence[Recipe], missing: Sequence[Recipe], jobs: int | None) -> Iterator[None]:
    """Show the cells while they train: a line per finished cell; on a terminal a bar over all epochs, and the grid at the end.

    A line says what the grid takes, as soon as that is known; nothing waits for an answer.
    """
    forecast, pending = Forecast(missing, jobs), [*missing]
    out, interactive = sys.stdout, sys.stdout.isatty()  # a training in this process redirects standard output
    # Its own estimate of the time left knows nothing of cells that have not begun.
    form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total} epochs{postfix}"
    epochs = sum(cell.epochs for cell in missing)
    bar = tqdm(desc="training", total=epochs, file=out, disable=not interactive, bar_format=form)

    def write(line: str) -> None:
        tqdm.write(line, file=out)
        out.flush()

    def left() -> str:
        seconds = forecast.left()
        return "" if seconds is None else f"about {duration(seconds)} left"

    def report() -> None:
        for cell in [*pending]:
            if is_done(cell.directory) or read(cell.directory, "failed"):
                pending.remove(cell)
                write(f"[{len(missing) - len(pending)}/{len(missing)}] {cell.cell}: {state_of(cell)}  {left()}")
        if interactive:
            trained = sum(len(read(cell.directory, "history") or ()) for cell in pending)
            bar.n = epochs - sum(cell.epochs for cell in pending) + trained
            bar.set_postfix_str(left())

    def watch() -> None:
        cost = None
        while not stop.wait(SECONDS):
            if cost is None and (cost := forecast.cost()):
                write(cost)
            report()

    stop, watcher = threading.Event(), threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        report()
        bar.close()
        if interactive:
            write(table(recipes))
