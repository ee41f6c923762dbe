"""The cells of a grid: what training them would take, and their states and the time that is left while they train."""

import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from tracker.common.text import counted, duration, entry, size
from vit.cells import finished_epochs, is_done, read
from vit.recipe import SETTINGS, Recipe

SHARE = 0.25  # of the rate of a product, that the steps of a DeiT-Ti reach on two cores
SECONDS = 2.0  # between two looks at the cells


def describe(
    missing: Sequence[Recipe], recipes: Sequence[Recipe], images: int, classes: int
) -> str:
    """Return what training the missing cells would take, which questions a grid can't answer, and what the smallest that answers
    all would take.

    Args:
        recipes: all cells of the grid.
        images: number of training images.
        classes: number of their classes.
    """
    from vit.answers import unanswerable
    from vit.model import build
    from vit.statistics import smallest_grid

    first = missing[0]
    weights = sum(parameter.numel() for parameter in build(first, classes).parameters())
    seconds_of_epoch = first.steps_per_epoch(images) * seconds_of_step(first, weights)
    epochs = sum(cell.epochs for cell in missing) - _finished(missing)
    expected = f"about {duration(epochs * seconds_of_epoch)} for the steps of all, one cell at a time on this machine"
    checkpoint = 3 * 4 * weights  # they and AdamW's two moments of each, in bytes
    kept = f"{size(len(missing) * checkpoint)} (last.ckpt)" if first.keep_checkpoint else "none"
    sizes = [len({getattr(cell, name) for cell in recipes}) for name in SETTINGS]
    lines = [
        ("time", expected),
        ("checkpoints", f"{size(checkpoint)} per cell; kept after training: {kept}"),
        *(("questions", line) for line in unanswerable(*sizes)),
    ]
    if (answering := smallest_grid(*sizes)) != tuple(sizes):
        decays, rates, seeds = answering
        cells = math.prod(answering)
        lines.append(
            (
                "tests",
                f"all questions: {decays} weight decays x {rates} rates x {seeds} seeds, {counted(cells, 'cell')}, about "
                f"{duration(cells * first.epochs * seconds_of_epoch)}",
            )
        )
    return "\n".join(entry(*line) for line in lines)


def _finished(cells: Sequence[Recipe]) -> int:
    return sum(finished_epochs(cell.directory) for cell in cells)


def seconds_of_step(recipe: Recipe, weights: int) -> float:
    """Return the seconds of a step on this machine: six operations for each weight and token."""
    import torch

    from tracker.measures.cost import this_machine

    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    gpu = (
        None
        if recipe.accelerator == "cpu"
        else torch.accelerator.current_accelerator(check_available=True)
    )
    rate = SHARE * this_machine(gpu or torch.device("cpu")).rate
    tokens = 1 + (recipe.image_size // recipe.patch_size) ** 2
    return 6 * weights * tokens * recipe.batch_size / rate


def state_of(recipe: Recipe) -> str:
    """Return a cell's state from its directory: accuracy, reason of a failure, or finished epochs."""
    result = read(recipe.directory, "result")
    if result:
        return (
            f"{result['accuracy']:.4f}"
            if result["status"] == "finished"
            else f"diverged: {result['reason']}"
        )
    if failure := read(recipe.directory, "failed"):
        return f"crashed: {failure['reason']}"
    finished = finished_epochs(recipe.directory)
    return f"{finished}/{recipe.epochs}" if finished else "not started"


@contextmanager
def shown(missing: Sequence[Recipe]) -> Iterator[None]:
    """Show the cells while they train: a line per finished cell, and on a terminal a bar over all epochs.

    The time left is that of an epoch since the start, of however many cells at a time, times the epochs left.
    """
    pending = [*missing]
    out = sys.stdout  # a training in this process redirects standard output
    started, before = time.perf_counter(), _finished(missing)
    form = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} epochs, {remaining} left"
    bar = tqdm(
        desc="training",
        total=sum(cell.epochs for cell in missing),
        initial=before,
        file=out,
        disable=not out.isatty(),
        bar_format=form,
    )

    def count_epochs() -> str:
        """Update the bar; return the time left in words, if it is known."""
        # An earlier history whose checkpoint is missing is written anew
        trained = max(_finished(missing), before)
        # A cell that diverges or crashes has no epochs left.
        left = sum(cell.epochs for cell in pending) - _finished(pending)
        bar.n, bar.total = trained, trained + left
        bar.refresh()
        if not left or trained == before:
            return ""
        seconds_per_epoch = (time.perf_counter() - started) / (trained - before)
        return f"  about {duration(seconds_per_epoch * left)} left"

    def report() -> None:
        for cell in [*pending]:
            if is_done(cell.directory) or read(cell.directory, "failed"):
                pending.remove(cell)
                number = f"[{len(missing) - len(pending)}/{len(missing)}]"
                tqdm.write(f"{number} {cell.cell}: {state_of(cell)}{count_epochs()}", file=out)
                out.flush()
        count_epochs()

    def watch() -> None:
        while not stop.wait(SECONDS):
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
