"""Runs in Weights & Biases: for each step the curve points and a heat map of the layer pairs for each K.

The metric axis is `training/step` instead of W&B's own step, so points may arrive in any order. The automatic workspace shows the
headline numbers (`tracker.measures.registry`) and hides the others that `LoggedRun.log` chooses. Numbers and pictures are
logged: neither prompts nor the store.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from tracker.common.files import read_json, write_atomic
from tracker.loggers.protocol import LoggedRun, Logger, Opener, Row
from tracker.measures.registry import MEAN_OFFDIAG

if TYPE_CHECKING:
    import wandb

Mode = Literal["auto", "online", "offline", "off"]
RunMode = Literal["online", "offline"]
Run = TypeVar("Run")

AXIS = "training/step"
FINISH = 20.0  # seconds for a server to take what is left of a run; everything is in the run's file


def prepare(wandb_mode: Mode) -> Opener | None:
    """Resolve the mode; return what opens a store's run, None for "off".

    Raises:
        ValueError: for `online` without a key.
    """
    resolved = resolve_mode(wandb_mode)
    if resolved == "disabled":
        return None
    return Opener(
        lambda run: with_offline_fallback(lambda mode: WandbRun(mode, run), resolved),
        lambda run: _where(resolved, run),
    )


def _where(mode: RunMode, run: LoggedRun) -> str:
    """Say where a run will be, and how to switch W&B off in a walk."""
    sent = "is sent there" if mode == "online" else "is sent"
    content = (
        "numbers and pictures, no prompts and no results files," if mode == "online" else "nothing"
    )
    directory = run.store.path / "wandb"
    stop = "" if run.new else "; --wandb off stops it"
    return f"W&B {mode}: project {run.project}, run {run.name}, files in {directory}: {content} {sent}{stop}"


def resolve_mode(mode: Mode) -> Literal["online", "offline", "disabled"]:
    """Return the mode W&B runs in: `auto` is online where a key is set up and accepted, otherwise offline.

    Raises:
        ValueError: for `online` without a key.
    """
    if mode == "off":
        return "disabled"
    import wandb
    from wandb.errors import AuthenticationError

    try:
        key = wandb.login(prompt=False)
    # The key is refused, or the server can't be reached to check it
    except AuthenticationError as error:
        print(f"W&B does not accept the key ({error}); logging offline", file=sys.stderr)
        return "offline"
    if mode == "online" and not key:
        raise ValueError(
            "--wandb online needs a key: run `wandb login` or set WANDB_API_KEY; or choose --wandb offline"
        )
    return "online" if mode == "online" or (mode == "auto" and key) else "offline"


def run_settings() -> "wandb.Settings":
    """Return the settings of every run: quiet, on disk within half a second, so that a killed run is kept, and never waiting
    long for a server at the end.
    """
    import wandb

    return wandb.Settings(
        x_transaction_log_flush_interval=0.5,
        console="off",
        silent=True,
        finish_timeout=FINISH,
        finish_timeout_raises=True,
    )


def with_offline_fallback(start: Callable[[RunMode], Run], mode: RunMode) -> Run:
    """Start a run in a mode; where W&B can't be reached, start it offline and print why."""
    from wandb.errors import CommError

    try:
        return start(mode)
    except CommError as error:
        print(f"W&B can't be reached ({error}); logging offline", file=sys.stderr)
        return start("offline")


def open_run() -> "wandb.Run | None":
    """Return the run that this process has open, which a logger would take for its own."""
    return getattr(sys.modules.get("wandb"), "run", None)


def finish(run: "wandb.Run", failed: bool = False) -> str:
    """Close a run, as failed or finished; return what W&B did not take, or ""."""
    try:
        run.finish(exit_code=int(failed))
    except TimeoutError:
        return f"did not take the run within {FINISH:.0f} s"
    return ""


def define_metrics(run: "wandb.Run", row: Row, defined: set[str], prefix: str = "") -> None:
    """Define the axis of the scalars of a row, and which of them the automatic workspace shows.

    Each metric is defined by its full name: W&B does not document which of several matching patterns applies.

    Args:
        defined: the metrics that have an axis; those of the row are added.
    """
    run.define_metric(AXIS, hidden=True)
    for name in sorted(row.scalars.keys() - defined):
        shown = name in row.headline
        # W&B keeps a summary of each metric, unless it is told not to.
        summary = "min,last" if name == MEAN_OFFDIAG else None if shown else "none"
        run.define_metric(prefix + name, step_metric=AXIS, hidden=not shown, summary=summary)
    defined |= row.scalars.keys()


# The steps of the training by run and by W&B's step, for all objects that add to the run
measured_steps: "WeakKeyDictionary[wandb.Run, dict[int, int]]" = WeakKeyDictionary()


def _pictures(row: Row, prefix: str = "") -> "dict[str, wandb.Image]":
    import wandb

    return {prefix + name: wandb.Image(picture) for name, picture in row.heatmaps().items()}


class OpenRun(Logger):
    """A run that the training program has opened, and closes. A step is one of W&B's rows, together with what the program logs.

    A measured step joins the row that is open, so that W&B numbers the program's own rows as it would without; a second one
    before the next of these rows begins a row. W&B then numbers later rows from there on, and drops those that are given a
    smaller step, such as an epoch.

    Args:
        prefix: put before the name of each metric, such as "val/".
    """

    def __init__(self, run: "wandb.Run", prefix: str):
        self.run, self.prefix = run, prefix
        self.defined: set[str] = set()  # metrics with an axis
        self.steps = measured_steps.setdefault(run, {})

    def images(self, row: Row) -> None:
        """Add the heat maps of a step."""
        pictures = _pictures(row, self.prefix)
        for name in sorted(pictures.keys() - self.defined):
            self.run.define_metric(name, step_metric=AXIS)
        self.defined |= pictures.keys()
        self._add(row.step, pictures)

    def log(self, row: Row) -> None:
        """Add the scalars of a step, over the axis of walks, so that both are drawn in one panel."""
        define_metrics(self.run, row, self.defined, self.prefix)
        self._add(row.step, {AXIS: row.step, **row.numbers(self.prefix)})

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        row = self.run.step
        row += self.steps.get(row, step) != step
        self.steps[row] = step
        # Uncommitted, so that the program's own numbers join the row
        self.run.log(dict(values), step=row, commit=False)


class WandbRun:
    """A W&B run of a store; each unit is logged once per run, in any order."""

    def __init__(self, mode: RunMode, run: LoggedRun):
        import wandb

        self.mode, self.store = mode, run.store
        # An online run can be resumed. An offline run can't, so a new one gets all units.
        resumable = mode == "online" and not run.new
        self.memory = run.store.path / "wandb-run.json" if resumable else None
        known = _remembered(self.memory) if self.memory else {}
        self.chosen = run.log if isinstance(run.log, str) else list(run.log)
        if known.get("log") != self.chosen:  # a new run gets all units, with these metrics
            known = {}
        self.logged: list[int] = known.get("logged", [])
        self.headlines: dict[int, Mapping[str, float]] = {}  # by step
        self.defined: set[str] = set()
        self.run: wandb.Run = wandb.init(
            project=run.project,
            name=run.name,
            config={**run.store.read_settings(), **run.config},
            mode=mode,
            dir=run.store.path,
            id=known.get("id"),
            resume="allow" if known else None,
            reinit="create_new",  # a run that this process has open, of a notebook, stays as it is
            settings=run_settings(),
        )
        for metric in ("training/suspect", "miscoupling/heatmap/*"):
            self.run.define_metric(metric, step_metric=AXIS)
        self.run.define_metric("training/tokens", hidden=True)

    def images(self, row: Row) -> None:
        """Add the heat maps to the step that `log` sends, unless it has it."""
        if row.step not in self.logged:
            self.run.log(_pictures(row), commit=False)

    def log(self, row: Row) -> None:
        """Send the scalars of one step, unless this run has it."""
        # Also of a step that the run has: its summary is that of all steps.
        self.headlines[row.step] = {name: row.scalars[name] for name in row.headline}
        if row.step in self.logged:
            return
        define_metrics(self.run, row, self.defined)
        self.run.log({AXIS: row.step, **row.numbers()})
        self.logged.append(row.step)

    def finish(self) -> str:
        """Close the run; return where it is, and what W&B did not take."""
        if self.headlines:
            self.run.summary.update(_summary(self.headlines))
        directory = Path(self.run.dir).parent
        missing = finish(self.run)
        if self.mode == "offline":
            return f"W&B offline: {directory} (send it with: wandb sync {quote(str(directory))})"
        if missing:
            return f"W&B {missing}. The whole run is in {directory}; send it with: wandb sync {quote(str(directory))}"
        # Only now has everything been sent; a killed run is replaced by a complete one
        if self.memory:
            content = {"id": self.run.id, "logged": self.logged, "log": self.chosen}
            write_atomic(self.memory, json.dumps(content).encode())
        return f"W&B online: {self.run.url}"


def _remembered(memory: Path) -> dict[str, Any]:
    """Return the W&B run of a store and the steps that it has; {} if there is none, or that is not known any more."""
    try:
        return read_json(memory, dict)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        print(f"{error}: a new W&B run gets all steps", file=sys.stderr)
        return {}


def _summary(headlines: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return the values of the last step. W&B's own summary has those that arrived last, maybe of an earlier step."""
    last = headlines[max(headlines)]
    summary: dict[str, Any] = dict(last)
    if MEAN_OFFDIAG in last:
        over_steps = [
            at[MEAN_OFFDIAG] for at in headlines.values() if math.isfinite(at[MEAN_OFFDIAG])
        ]
        summary[MEAN_OFFDIAG] = {
            "min": min(over_steps, default=math.nan),
            "last": last[MEAN_OFFDIAG],
        }
    return summary
