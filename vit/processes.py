"""Train cells on this machine, each in its own process, so that a crash affects one cell only.

Workers are forked from a server that has imported torch and Lightning but has not computed anything (no CUDA context, no
threads), so a cell starts in a tenth of the time that a new interpreter takes.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from vit.cells import PATIENCE, BusyError, is_done, write
from vit.recipe import Recipe

BUSY = 75  # exit status of a worker whose cell another process trains

PRELOADED = ["vit.module", "vit.loaders", "vit.training", "tracker.measurement", "lightning.pytorch.callbacks", "wandb"]


def start_server() -> None:
    """Start the fork server, which imports the workers' modules in the background."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    import torch

    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


def run_cells(
    recipes: Sequence[Recipe],
    jobs: int,
    retries: int,
    on_end: Callable[[Recipe], None],
    gpus: Sequence[str] = (),
) -> None:
    """Train the cells, `jobs` at a time; a crash is retried `retries` times, then recorded in failed.json.

    A cell that another process trains comes last, and is waited for.

    Args:
        on_end: called with each cell that is done or has failed.
        gpus: the GPUs over which the cells are spread, each with one of them in its CUDA_VISIBLE_DEVICES. Default: the
            environment of the cells is that of this process.

    Raises:
        KeyboardInterrupt: if interrupted, after the workers have been killed.
    """
    context = multiprocessing.get_context("forkserver")
    start_server()
    waiting = [(recipe, retries) for recipe in recipes]
    busy: list[tuple[Recipe, int]] = []
    said = ""
    running: dict[int, tuple[BaseProcess, Recipe, int, str | None]] = {}
    try:
        while waiting or running or busy:
            if not waiting and not running:
                names = ", ".join(recipe.cell for recipe, _ in busy)
                if names != said:
                    print(f"{names}: trained by another process; waiting for it", flush=True)
                said = names
                time.sleep(PATIENCE)
                waiting, busy = busy, []
            while waiting and len(running) < jobs:
                recipe, tries = waiting.pop(0)
                used = [gpu for _, _, _, gpu in running.values()]
                gpu = min(gpus, key=used.count, default=None)
                process = context.Process(target=_on_gpu, args=(gpu, _train_cell, recipe))
                process.start()
                running[process.sentinel] = process, recipe, tries, gpu
            for sentinel in connection.wait(list(running)):
                process, recipe, tries, _ = running.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                if is_done(recipe.directory):
                    on_end(recipe)
                elif process.exitcode == BUSY:
                    busy.append((recipe, tries))
                elif tries:
                    waiting.insert(0, (recipe, tries - 1))
                else:
                    _record_failure(recipe, _reason(process, recipe.directory))
                    on_end(recipe)
    finally:
        for process, *_ in running.values():  # safe: every file is written atomically
            process.kill()
            process.join()


def _record_failure(recipe: Recipe, reason: str) -> None:
    try:
        recipe.directory.mkdir(parents=True, exist_ok=True)
        write(recipe.directory, "failed", {"reason": reason})
    except OSError as error:
        print(f"{recipe.cell}: {reason} ({error})", file=sys.stderr, flush=True)


def _reason(process: BaseProcess, directory: Path) -> str:
    if process.exitcode and process.exitcode < 0:
        name = signal.Signals(-process.exitcode).name
        return f"the process was killed by {name}" + (", often for lack of memory" if name == "SIGKILL" else "")
    try:
        lines = (directory / "log.txt").read_text(errors="replace").strip().splitlines()
    except OSError as error:
        return f"exit status {process.exitcode}, without a log ({error})"
    return lines[-1] if lines else f"exit status {process.exitcode}"


def _on_gpu(gpu: str | None, train: Callable[[Recipe], None], recipe: Recipe) -> None:
    """Train a cell on one of the GPUs; the driver reads the variable when CUDA is first used, which is later than here."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    train(recipe)


def _train_cell(recipe: Recipe) -> None:
    # Ctrl-C reaches the whole process group; the driver handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_driver, daemon=True).start()
    recipe.directory.mkdir(parents=True, exist_ok=True)
    log = os.open(recipe.directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from vit.training import train

    try:
        train(recipe, show=True)
    except BusyError:
        sys.exit(BUSY)
    except Exception:  # any failure is recorded with its cell, and the other cells continue
        traceback.print_exc()
        sys.stderr.flush()
        sys.exit(1)


def _exit_with_driver() -> None:
    """Exit when the driver dies, so that no orphaned worker competes with the next driver's."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    connection.wait([driver.sentinel])
    os._exit(1)
