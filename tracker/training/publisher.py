"""Where a measured unit of a training run goes: loggers, the trainer's metrics, the store, the caller."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import xarray as xr

from tracker.loggers.protocol import Log, Logger, Row
from tracker.loggers.selection import chosen
from tracker.results import Store

COST = ("coupling/seconds", "coupling/share")
SKIPPED = "coupling/skipped"
Metrics = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True)
class Publisher:
    """Sends the units of one training.

    Args:
        loggers: receive the chosen metrics on every rank.
        metrics: receives all finite metrics, on every rank.
        log: which metrics the loggers receive, besides `COST` and `SKIPPED`.
        prefix: of all metrics.
        heatmaps: whether loggers that take pictures receive those of the coupling matrices.
        store, on_measure: receive every unit.
    """

    loggers: Sequence[Logger]
    metrics: Metrics | None
    log: Log
    prefix: str
    heatmaps: bool
    store: Store | None
    on_measure: Callable[[xr.Dataset], None] | None

    def row(self, unit: xr.Dataset) -> Row:
        """Return the row of a unit.

        Raises:
            UsageError: if a name in `log` is no metric.
        """
        row = Row.from_unit(unit)
        self._chosen(row)
        return row

    def update_metrics(self, row: Row) -> None:
        """Hand out the metrics; an undefined value would make Lightning's EarlyStopping end the run."""
        if self.metrics is not None:
            self.metrics({self.prefix + name: x for name, x in row.scalars.items() if math.isfinite(x)})

    def store_unit(self, row: Row, unit: xr.Dataset) -> None:
        """Write a unit to the store."""
        if self.store is not None:
            self.store.write(row.step, unit)

    def call(self, row: Row, unit: xr.Dataset) -> None:
        """Call the user's function."""
        if self.on_measure is not None:
            self.on_measure(unit)

    def log_row(self, row: Row, unit: xr.Dataset) -> None:
        """Log the chosen metrics, and the pictures."""
        logged = self._chosen(row)
        for logger in self.loggers:
            if self.heatmaps:
                logger.images(row)
            logger.log(logged)

    def sinks(self) -> dict[str, Callable[..., None]]:
        """Return the places that a unit is sent to, by what to say if one fails."""
        return {"not logged": self.log_row, "not stored": self.store_unit, "on_measure failed": self.call}

    def report_cost(self, step: int, seconds: float, share: float, skipped: int) -> None:
        """Log what a measurement took, and the number of skipped steps once there is one."""
        values = dict(zip(COST, (seconds, share), strict=True)) | ({SKIPPED: skipped} if skipped else {})
        for logger in self.loggers:
            logger.log(Row(step, values, headline=tuple(values)))

    def _chosen(self, row: Row) -> Row:
        """Return the row with the metrics to log."""
        return chosen(row, self.log, (*COST, SKIPPED))
