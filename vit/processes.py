"""Cells one after another on this machine, each in a process of its own: one that dies takes no other with it.

Workers are forked from a server that has imported torch and Lightning once and computed nothing (no CUDA context, no
threads of its own), so a cell starts in a tenth of the time a fresh interpreter takes.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from vit.cells import is_done, write
from vit.recipe import Recipe

PRELOADED = ["vit.module", "vit.loaders", "vit.train", "tracker.measurement", "lightning.pytorch.callbacks", "wandb"]


def start_server() -> None:
    """Begin to import what the workers need; returns at once."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def run_cells(recipes: Sequence[Recipe], jobs: int, retries: int, ended: Callable[[Recipe], None]) -> None:
    """Train the cells, `jobs` at a time; a death is tried again `retries` times, then recorded in failed.json.

    Args:
        ended: called with each cell that is done or given up.

    Raises:
        KeyboardInterrupt: if interrupted, once the workers have been ended.
    """
    context = multiprocessing.get_context("forkserver")
    start_server()
    waiting = [(recipe, retries) for recipe in recipes]
    running: dict[int, tuple[BaseProcess, Recipe, int]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                recipe, tries = waiting.pop(0)
                process = context.Process(target=_train_cell, args=(recipe,))
                process.start()
                running[process.sentinel] = process, recipe, tries
            for sentinel in connection.wait(list(running)):
                process, recipe, tries = running.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                if is_done(recipe.directory):
                    ended(recipe)
                elif tries:
                    waiting.insert(0, (recipe, tries - 1))
                else:
                    write(recipe.directory, "failed", {"reason": _reason(process, recipe.directory)})
                    ended(recipe)
    finally:
        for process, _, _ in running.values():  # every file is written whole or not at all
            process.kill()
            process.join()


def _reason(process: BaseProcess, directory: Path) -> str:
    if process.exitcode and process.exitcode < 0:
        name = signal.Signals(-process.exitcode).name
        return f"the process was ended by {name}" + (", often for want of memory" if name == "SIGKILL" else "")
    lines = (directory / "log.txt").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {process.exitcode}"


def _train_cell(recipe: Recipe) -> None:
    # Ctrl-C reaches the whole process group; the driver answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_driver, daemon=True).start()
    recipe.directory.mkdir(parents=True, exist_ok=True)
    log = os.open(recipe.directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from vit.train import train

    try:
        train(recipe, show=True)
    except Exception:  # whatever ends a cell is recorded with it, and the others go on
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)


def _end_with_the_driver() -> None:
    """A killed driver leaves no worker behind to race the one that is started next."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    connection.wait([driver.sentinel])
    os._exit(1)
