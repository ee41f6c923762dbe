"""What a walk keeps in memory of the units that it has measured or found: their summaries. The store has the rest."""

import xarray as xr

from tracker.loggers.protocol import Row
from tracker.report.reader import Reader
from tracker.results import Store


class Measured:
    """The units of a store as the page and loggers need them: each is read once, or not at all where it was measured here.

    Args:
        with_rows: keep also the row that loggers receive of each unit, until it is taken.
    """

    def __init__(self, store: Store, with_rows: bool):
        self.store, self.with_rows = store, with_rows
        self.reader = Reader()
        self.summaries: dict[int, xr.Dataset] = {}  # by step
        self._rows: dict[int, Row] = {}

    def read(self, step: int) -> xr.Dataset:
        """The summary of a unit that is in the store.

        Raises:
            ValueError: if its file is damaged.
        """
        return self._summarised(step, self.reader.unit(self.store, step))

    def write(self, step: int, unit: xr.Dataset) -> xr.Dataset:
        """Write a unit whose step is claimed; returns its summary."""
        self.store.write(step, unit)
        self.reader.hold(self.store, step, unit)
        return self._summarised(step, unit)

    def row(self, step: int) -> Row | None:
        """Take the row that loggers receive of a unit; None if it was taken before, or without loggers."""
        return self._rows.pop(step, None)

    def _summarised(self, step: int, unit: xr.Dataset) -> xr.Dataset:
        if self.with_rows:
            self._rows[step] = Row.from_unit(unit)
        self.summaries[step] = self.reader.summary(self.store, step)
        return self.summaries[step]
