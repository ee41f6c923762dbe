"""Runs in Weights & Biases: the curves, a heat map and the table of layer pairs for each step, as the store has them.

The metric axis is `checkpoint/step`, not W&B's own step, so points may arrive in any order. Every number of
`statistics.scalars` is logged; the automatic workspace shows the curves, and hides quartiles, null levels and variants,
which `tracker.dashboards` puts beside them.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import xarray as xr

from checkpoints.files import write_whole
from tracker.analysis.statistics import HEADLINE, scalars
from tracker.measures.coupling import MEASURES
from tracker.results import Store

if TYPE_CHECKING:
    import wandb

Mode = Literal["auto", "online", "offline", "off"]
RunMode = Literal["online", "offline"]
Run = TypeVar("Run")

AXIS = "checkpoint/step"
SAMPLES = ("prompt", "token")
SHOWN = re.compile(
    rf"{HEADLINE}(_null)?|coupling/(miscoupling|offdiag_normalized)/k\d+/mean_offdiag|coupling/(seconds|share)"
    r"|trajectory/\w+/median|trajectory/noise_similarity/10pct|tokens/\w+/offdiag_normalized/k\d+|score/.*"
)


def resolve_mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    """What W&B will do: `auto` is online where a key is set up and accepted, else offline.

    Raises:
        ValueError: for `online` without a key.
    """
    import wandb
    from wandb.errors import AuthenticationError

    if mode == "off":
        return "disabled"
    try:
        key = wandb.login(prompt=False)
    except AuthenticationError as error:  # of a key that is set up: refused, or W&B can't be asked
        print(f"W&B does not answer for the key ({error}); logging offline", file=sys.stderr)
        return "offline"
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


def define_metrics(run: "wandb.Run", names: Iterable[str], prefix: str = "") -> None:
    """Give metrics their axis; hide those that the automatic workspace would be cluttered with.

    Each by its full name: where several patterns fit one metric, W&B does not say which counts.
    """
    run.define_metric(AXIS, hidden=True)
    for name in names:
        shown = SHOWN.fullmatch(name) is not None
        summary = "min,last" if name == HEADLINE else None if shown else "none"
        run.define_metric(prefix + name, step_metric=AXIS, hidden=not shown, summary=summary)


@dataclass(frozen=True)
class Row:
    """What a run is sent of one unit; a few kilobytes, however many prompts were measured."""

    step: int
    points: dict[str, float]
    marks: dict[str, int]
    matrices: xr.Dataset  # of layer pairs, as if their means were of one prompt and token


def row_of(unit: xr.Dataset) -> Row:
    """What a run is sent of this unit."""
    marks = {}
    if "suspect" in unit.coords:
        marks["checkpoint/suspect"] = int(unit["suspect"].item() != "")
    if "tokens_seen" in unit.coords:
        marks["checkpoint/tokens"] = int(unit["tokens_seen"])
    matrices = unit[[name for name in MEASURES if name in unit]].mean(SAMPLES).expand_dims(SAMPLES)
    return Row(int(unit["step"]), scalars(unit), marks, matrices)


class WandbLog:
    """A W&B run that shows a store: each unit once in a run, whatever was measured when.

    Args:
        config: what to say of the run besides the store's settings.
        anew: begin a new run, also online; else the store's own run is taken up again.
    """

    def __init__(
        self, mode: RunMode, store: Store, project: str, name: str, config: Mapping[str, Any], anew: bool = False
    ):
        import wandb

        # An online run is taken up again; an offline one can't be, so it is told everything anew.
        self.memory = None if anew or mode == "offline" else store.path / "wandb-run.json"
        known = json.loads(self.memory.read_text()) if self.memory and self.memory.exists() else {}
        self.logged: list[int] = known.get("logged", [])
        self.points: dict[int, dict[str, float]] = {}
        self.defined: set[str] = set()
        self.store = store
        settings = store.asked()
        self.run: wandb.Run = wandb.init(
            project=project,
            name=name,
            config={**settings, **config},
            mode=mode,
            dir=store.path,
            id=known.get("id"),
            resume="allow" if known else None,
            settings=run_settings(),
        )
        self.mode = mode
        for name in ("checkpoint/suspect", "coupling/heatmap/*", "coupling/pairs"):
            self.run.define_metric(name, step_metric=AXIS)
        self.run.define_metric("checkpoint/tokens", hidden=True)

    def log(self, unit: xr.Dataset) -> None:
        """Send one unit, unless this run has it."""
        self.send(row_of(unit))

    def send(self, row: Row) -> None:
        """Send the row of one unit, unless this run has it."""
        self.points[row.step] = row.points
        if row.step in self.logged:
            return
        define_metrics(self.run, sorted(row.points.keys() - self.defined))
        self.defined |= row.points.keys()
        pictures = _pictures(row.matrices) if "miscoupling" in row.matrices else {}
        self.run.log({AXIS: row.step, **row.points, **row.marks, **pictures})
        self.logged.append(row.step)

    def finish(self) -> str:
        """Keep the store as an artifact and close the run; returns where it is to be seen."""
        if self.points:
            self.run.summary.update(_summary(self.points))
        if self.store.steps():
            self.run.log_artifact(_artifact(self.store))
        directory = Path(self.run.dir).parent
        where = self.run.url if self.mode == "online" else f"{directory} (send it with: wandb sync {directory})"
        self.run.finish()
        if self.memory:  # only now has everything been sent; a killed run is replaced by a whole one
            write_whole(self.memory, json.dumps({"id": self.run.id, "logged": self.logged}).encode())
        return f"W&B {self.mode}: {where}"


def _summary(points: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """The values of the last step: W&B's own are those that came last, perhaps of a step that was filled in."""
    last = points[max(points)]
    summary: dict[str, Any] = {name: value for name, value in last.items() if SHOWN.fullmatch(name)}
    if HEADLINE in last:
        over_steps = [at[HEADLINE] for at in points.values() if math.isfinite(at[HEADLINE])]
        summary[HEADLINE] = {"min": min(over_steps, default=math.nan), "last": last[HEADLINE]}
    return summary


def _artifact(store: Store) -> "wandb.Artifact":
    """The units of a store and the settings they were measured with; W&B keeps one version for each content."""
    import wandb

    name = re.sub(r"[^\w.-]", "-", f"results-{store.path.resolve().name}")[:128]
    artifact = wandb.Artifact(name, type="results", metadata=store.asked())
    for file in (store.settings, *map(store.file, store.steps())):
        artifact.add_file(str(file), name=str(file.relative_to(store.path)))
    return artifact


def _pictures(unit: xr.Dataset) -> dict[str, Any]:
    import wandb

    from tracker.figures.drawing import coupling_heatmap, pixels

    images = {f"coupling/heatmap/k{k}": wandb.Image(pixels(coupling_heatmap(unit, int(k)))) for k in unit["k"].values}
    measured = [name for name in MEASURES if name in unit]
    pairs = unit[measured].mean(("prompt", "token")).to_dataframe().reset_index()
    columns = ["k", "layer", "layer_other", *measured]
    return images | {"coupling/pairs": wandb.Table(columns=list(columns), data=pairs[columns].values.tolist())}
