"""Weights & Biases: the curves, a heat map and the table of layer pairs for each step, replayed from the store.

The metric axis is `checkpoint/step`, not W&B's own step, so points may arrive in any order.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import xarray as xr

from checkpoints.files import write_whole
from tracker.coupling import MEASURES
from tracker.results import Store
from tracker.statistics import scalars

if TYPE_CHECKING:
    import wandb

Mode = Literal["auto", "online", "offline", "off"]
RunMode = Literal["online", "offline"]
Run = TypeVar("Run")


def resolve_mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    """What W&B will do: `auto` is online where a key is set up, else offline.

    Raises:
        ValueError: for `online` without a key.
    """
    import wandb

    if mode == "off":
        return "disabled"
    key = wandb.login(prompt=False)
    if mode == "online" and not key:
        raise ValueError(
            "--wandb online needs a key: run `wandb login` or set WANDB_API_KEY; or choose --wandb offline"
        )
    return "online" if mode == "online" or (mode == "auto" and key) else "offline"


def run_settings() -> "wandb.Settings":
    """For every run: quiet, and rows reach the disk within half a second (a killed run would lose the last fifty)."""
    import wandb

    return wandb.Settings(x_transaction_log_flush_interval=0.5, console="off", silent=True)


def begun(begin: Callable[[RunMode], Run], mode: RunMode) -> Run:
    """A run begun in a mode, or offline where W&B can't be reached."""
    from wandb.errors import CommError

    try:
        return begin(mode)
    except CommError as error:
        print(f"W&B can't be reached ({error}); logging offline", file=sys.stderr)
        return begin("offline")


class WandbLog:
    """A W&B run that shows a store: each unit once in a run, whatever was measured when."""

    def __init__(self, mode: RunMode, store: Store, project: str, name: str, config: dict[str, Any]):
        import wandb

        # An online run is taken up again; an offline one can't be, so it is told everything anew.
        self.memory = store.path / "wandb-run.json"
        known = json.loads(self.memory.read_text()) if mode == "online" and self.memory.exists() else {}
        self.logged: list[int] = known.get("logged", [])
        self.run: wandb.Run = wandb.init(
            project=project,
            name=name,
            config=config,
            mode=mode,
            dir=store.path,
            id=known.get("id"),
            resume="allow" if known else None,
            settings=run_settings(),
        )
        self.mode = mode
        self.run.define_metric("checkpoint/step", hidden=True)
        for group in ("coupling/*", "trajectory/*", "score/*", "checkpoint/tokens", "checkpoint/suspect"):
            self.run.define_metric(group, step_metric="checkpoint/step")

    def log(self, unit: xr.Dataset) -> None:
        """Send one unit, unless this run has it."""
        step = int(unit["step"])
        if step in self.logged:
            return
        row: dict[str, Any] = {"checkpoint/step": step, **scalars(unit)}
        if "suspect" in unit.coords:
            row["checkpoint/suspect"] = int(unit["suspect"].item() != "")
        if "tokens_seen" in unit.coords:
            row["checkpoint/tokens"] = int(unit["tokens_seen"])
        if "miscoupling" in unit:
            row |= _pictures(unit)
        self.run.log(row)
        self.logged.append(step)

    def finish(self) -> str:
        """Close the run; returns where it is to be seen."""
        directory = Path(self.run.dir).parent
        where = self.run.url if self.mode == "online" else f"{directory} (send it with: wandb sync {directory})"
        self.run.finish()
        if self.mode == "online":  # only now has everything been sent; a killed run is replaced by a whole one
            write_whole(self.memory, json.dumps({"id": self.run.id, "logged": self.logged}).encode())
        return f"W&B {self.mode}: {where}"


def _pictures(unit: xr.Dataset) -> dict[str, Any]:
    import wandb

    from tracker.drawing import coupling_heatmap, pixels

    images = {f"coupling/heatmap/k{k}": wandb.Image(pixels(coupling_heatmap(unit, int(k)))) for k in unit["k"].values}
    pairs = unit[list(MEASURES)].mean(("prompt", "token")).to_dataframe().reset_index()
    columns = ["k", "layer", "layer_other", *MEASURES]
    return images | {"coupling/pairs": wandb.Table(columns=list(columns), data=pairs[columns].values.tolist())}
