"""The summaries of a store's units, which a walk keeps in memory; the units themselves are in the store."""

import sys
from dataclasses import dataclass

import xarray as xr

from checkpoints.errors import CheckpointError
from tracker.analysis.reduction import reduced
from tracker.loggers.protocol import Row
from tracker.measures.alike import require_one_curve
from tracker.measures.labels import labelled
from tracker.measures.netcdf import file_content
from tracker.report.reader import Reader
from tracker.results import Store


@dataclass(frozen=True)
class Prepared:
    """A measured unit that is ready to be written."""

    content: bytes | memoryview
    summary: xr.Dataset
    row: Row | None


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

    def read(self, step: int) -> None:
        """Read a unit from the store.

        Raises:
            ValueError: if its file is damaged.
        """
        unit = self.reader.unit(self.store, step)
        self._keep(step, self._row(unit))

    def read_or_remove(self, step: int) -> bool:
        """Read the unit of a step, if there is one; remove its file, with a notice, if it is damaged and no walk has the step.

        Returns:
            Whether the unit was read.
        """
        try:
            self.read(step)
            return True
        except FileNotFoundError:  # another walk has removed it
            return False
        except ValueError as error:
            print(f"{error}: it is measured again", file=sys.stderr)
        claim = self.store.claim(step)
        if claim is None:  # another walk measures it
            return False
        try:
            return self.read_claimed(step)
        finally:
            claim.release(remove=True)

    def read_claimed(self, step: int) -> bool:
        """Read the unit of a step that is claimed; remove its file if it is damaged; return whether it was read."""
        try:
            self.read(step)
            return True
        except (FileNotFoundError, ValueError):
            self.store.file(step).unlink(missing_ok=True)
            return False

    def prepare(self, unit: xr.Dataset) -> Prepared:
        """Reduce a measured unit, and make the content of its file.

        Raises:
            CheckpointError: if it makes no curve with the units of the store.
        """
        unit = labelled(unit)
        summarised = reduced(unit)
        for step, known in self.by_step.items():
            try:
                require_one_curve([known, summarised], self.store.path)
            except ValueError as error:
                raise CheckpointError(
                    f"its results do not belong to the curve of the others: with it and step {step}, {error}. Leave out the one "
                    "that is of another model, or measure it into another --out"
                ) from error
            break  # all others are alike
        return Prepared(file_content(unit), summarised, self._row(unit, summarised))

    def add(self, step: int, prepared: Prepared) -> xr.Dataset:
        """Write a unit whose step is claimed; return its summary."""
        self.store.write_content(step, prepared.content)
        self.reader.hold(self.store, step, prepared.summary)
        return self._keep(step, prepared.row)

    def write(self, step: int, unit: xr.Dataset) -> xr.Dataset:
        """Prepare and add a unit."""
        return self.add(step, self.prepare(unit))

    def row(self, step: int) -> Row | None:
        """Take the row that loggers receive of a unit; None if it was taken before, or without loggers."""
        return self._rows.pop(step, None)

    def _row(self, unit: xr.Dataset, points: xr.Dataset | None = None) -> Row | None:
        return Row.from_unit(unit, points) if self.with_rows else None

    def _keep(self, step: int, row: Row | None) -> xr.Dataset:
        if row is not None:
            self._rows[step] = row
        self.by_step[step] = self.reader.summary(self.store, step)
        return self.by_step[step]
