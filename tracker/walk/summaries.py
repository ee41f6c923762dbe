"""The summaries of a store's units, which a walk keeps in memory; the units themselves are in the store."""

import xarray as xr

from tracker.loggers.protocol import Row
from tracker.measures.labels import labelled
from tracker.report.reader import Reader
from tracker.results import Store


class Summaries:
    """The units of a store, reduced for the page and the loggers. A unit is read once; one measured here is not read.

    Args:
        with_rows: keep also each unit's row for the loggers, until it is taken.
    """

    def __init__(self, store: Store, with_rows: bool):
        self.store, self.with_rows = store, with_rows
        self.reader = Reader()
        self.by_step: dict[int, xr.Dataset] = {}  # by step
        self._rows: dict[int, Row] = {}

    def read(self, step: int) -> xr.Dataset:
        """Read a unit from the store and return its summary.

        Raises:
            ValueError: if its file is damaged.
        """
        return self._summarize(step, self.reader.unit(self.store, step))

    def write(self, step: int, unit: xr.Dataset) -> xr.Dataset:
        """Write a unit whose step is claimed; return its summary."""
        unit = labelled(unit)
        self.store.write(step, unit)
        self.reader.hold(self.store, step, unit)
        return self._summarize(step, unit)

    def row(self, step: int) -> Row | None:
        """Take the row that loggers receive of a unit; None if it was taken before, or without loggers."""
        return self._rows.pop(step, None)

    def _summarize(self, step: int, unit: xr.Dataset) -> xr.Dataset:
        if self.with_rows:
            self._rows[step] = Row.from_unit(unit)
        self.by_step[step] = self.reader.summary(self.store, step)
        return self.by_step[step]
