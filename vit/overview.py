"""The cells of a grid while they train: their states, a table of accuracies, and the time that is left."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING

from tracker.measures.cost import duration
from vit.cells import is_done, read
from vit.recipe import Recipe
from vit.resources import recommended_share

if TYPE_CHECKING:
    from rich.table import Table

SECONDS = 2.0  # between two looks at the cells


def state_of(recipe: Recipe) -> str:
    """Return a cell's state from its directory: accuracy, reason of a failure, or finished epochs."""
    result = read(recipe.directory, "result")
    if result:
        return f"{result['accuracy']:.4f}" if result["status"] == "finished" else f"diverged: {result['reason']}"
    if failure := read(recipe.directory, "failed"):
        return f"crashed: {failure['reason']}"
    history = read(recipe.directory, "history")
    return f"{len(history)}/{recipe.epochs}" if history else "not started"


def table(recipes: Sequence[Recipe], left: str = "") -> "Table":
    """Return a table of the grid: the test accuracy (a mean over seeds) of finished cells, the state of the others."""
    from rich.table import Table

    rates = sorted({recipe.drop_path for recipe in recipes})
    caption = f"rows: weight decay; columns: stochastic depth{left and f'; {left}'}"
    shown = Table(title="test accuracy, or finished epochs", caption=caption)
    shown.add_column("", justify="right")
    for rate in rates:
        shown.add_column(f"{rate:g}", justify="right")
    for decay in sorted({recipe.weight_decay for recipe in recipes}):
        row = [[r for r in recipes if (r.weight_decay, r.drop_path) == (decay, rate)] for rate in rates]
        shown.add_row(f"{decay:g}", *map(_cell_text, row))
    return shown


def _cell_text(seeds: Sequence[Recipe]) -> str:
    states = [state_of(recipe).partition(":")[0] for recipe in seeds]
    try:
        accuracy = f"{mean(map(float, states)):.4f}"
    except ValueError:  # some seed has not finished
        return " ".join("·" if state == "not started" else state for state in states)
    return f"[bold]{accuracy}[/bold]"


class Forecast:
    """The time that a grid takes, from the first steps of its cells on (`vit.pace`).

    Args:
        missing: the cells to train.
        jobs: number of cells that are trained at the same time; None: as many as are seen to be.
    """

    def __init__(self, missing: Sequence[Recipe], jobs: int | None):
        self.missing, self.jobs = missing, jobs
        self.started, self.ended = time.time(), 0
        self.whole: float | None = None  # seconds of a cell
        self.together = jobs or 1
        self.memory, self.of_memory = 0, 0  # bytes that a cell takes, and those of its GPU

    def left(self) -> float | None:
        """Return the seconds until the last cell is trained; None if nothing is known yet."""
        waiting = [
            cell for cell in self.missing if not is_done(cell.directory) and read(cell.directory, "failed") is None
        ]
        paces = {cell.cell: read(cell.directory, "pace") for cell in waiting}
        running = {name: pace for name, pace in paces.items() if pace and pace["written"] >= self.started}
        if running:
            self.whole = mean(pace["whole"] for pace in running.values())
            self.memory, self.of_memory = (
                max(pace[name] for pace in running.values()) for name in ("memory", "of_memory")
            )
            self.together = self.jobs or max(self.together, len(running))
        if self.whole is None:  # the cells have too few steps
            elapsed = time.time() - self.started
            return elapsed / self.ended * (len(self.missing) - self.ended) if self.ended else None
        now = time.time()
        seconds = [max(pace["left"] - (now - pace["written"]), 0.0) for pace in running.values()]
        for cell in waiting:
            if cell.cell not in running:
                seconds.append(self.whole * (1 - len(read(cell.directory, "history") or ()) / cell.epochs))
        return max(sum(seconds) / min(self.together, len(seconds)), *seconds) if seconds else 0.0

    def cost(self, on_a_gpu: float) -> str | None:
        """Return in words what the grid takes, once steps have been timed.

        Args:
            on_a_gpu: number of cells that share a GPU.
        """
        left = self.left()
        if left is None or self.whole is None:
            return None
        share = recommended_share(self.memory, self.of_memory, on_a_gpu)
        return (
            f"about {duration(self.whole)} per cell and {duration(left)} in all, {min(self.together, len(self.missing))} at a "
            f"time, from the first steps{share and f'; {share}'}; Ctrl-C stops, the same command continues"
        )


@contextmanager
def shown(
    recipes: Sequence[Recipe], missing: Sequence[Recipe], jobs: int | None, on_a_gpu: float = 1.0
) -> Iterator[Callable[[Recipe], None]]:
    """Show the cells while they train: a live table on a terminal, otherwise a line per finished cell.

    Both begin with a line that says what the grid takes, as soon as that is known; nothing waits for an answer.
    """
    from rich.console import Console
    from rich.live import Live

    console, forecast = Console(), Forecast(missing, jobs)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def left() -> str:
        seconds = forecast.left()
        return "" if seconds is None else f"about {duration(seconds)} left"

    def ended(recipe: Recipe) -> None:
        forecast.ended += 1
        say(f"[{forecast.ended}/{len(missing)}] {recipe.cell}: {state_of(recipe)}  {left()}")

    def watch() -> None:
        told = False
        while not stop.wait(SECONDS):
            if not told and (cost := forecast.cost(on_a_gpu)):
                say(cost)
                told = True
            if console.is_terminal:
                live.update(table(recipes, left()), refresh=True)

    stop, watcher = threading.Event(), threading.Thread(target=watch, daemon=True)
    live = Live(table(recipes), console=console, auto_refresh=False)
    if console.is_terminal:
        live.start()
    watcher.start()
    try:
        yield ended
    finally:
        stop.set()
        watcher.join()
        if console.is_terminal:
            live.update(table(recipes), refresh=True)
            live.stop()
