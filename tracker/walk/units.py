"""The units of a store that a walk adds to: what it must know of each, and the rows that its loggers receive."""

import sys
from dataclasses import dataclass

import numpy as np
import xarray as xr

from tracker.common.errors import CheckpointError
from tracker.loggers.protocol import Row
from tracker.measures.dataset import unlabelled
from tracker.store.netcdf import DamagedFile, file_content
from tracker.store.results import Store, likeness, require_one_curve


@dataclass(frozen=True)
class Known:
    """What a walk knows of a unit.

    Attributes:
        likeness: what all units of the store share.
        revision, files_sha256, fingerprint: of the weights.
        token_ids_sha256: of the prompts.
        scores: by task.
    """

    likeness: dict[str, set[str]]
    revision: str
    files_sha256: str
    fingerprint: str
    token_ids_sha256: str
    scores: dict[str, float]


@dataclass(frozen=True)
class Serialized:
    """A measured unit that is ready to be written, and what the walk prints of it."""

    content: memoryview
    known: Known
    row: Row
    weights_kept: str
    memory_budget: str


class Units:
    """The units of a store. The units themselves are on the disk, their rows in memory until they are taken.

    Args:
        store: the store.
        with_rows: make the rows of units that were read.
    """

    def __init__(self, store: Store, with_rows: bool):
        self.store, self.with_rows = store, with_rows
        self.known: dict[int, Known] = {}  # by step
        self._rows: dict[int, Row] = {}

    def read(self, steps: list[int]) -> None:
        """Read units; remove the files that are damaged, with a notice, unless another walk has their steps.

        Raises:
            ValueError: if the units make no curve.
        """
        damaged: dict[int, OSError | ValueError] = {}
        self._read(steps, damaged)
        for step, error in damaged.items():
            if isinstance(error, FileNotFoundError):  # another walk has removed it
                continue
            print(f"{error}: it is measured again", file=sys.stderr)
            if claim := self.store.claim(step):
                try:
                    self.read_claimed(step)
                finally:
                    claim.release(remove=True)

    def read_claimed(self, step: int) -> bool:
        """Read the unit of a step that is claimed; remove its file if it is damaged; return whether it was read."""
        damaged: dict[int, OSError | ValueError] = {}
        self._read([step], damaged)
        if isinstance(damaged.get(step), DamagedFile):
            self.store.file(step).unlink(missing_ok=True)
        return not damaged

    def prepare(self, unit: xr.Dataset) -> Serialized:
        """Reduce a measured unit, and make the content of its file.

        Raises:
            CheckpointError: if it makes no curve with the units of the store.
        """
        known = _known(unit)
        for step, other in self.known.items():
            try:
                require_one_curve([other.likeness, known.likeness], self.store.path)
            except ValueError as error:
                raise CheckpointError(
                    f"its results do not belong to the curve of the others: with it and step {step}, {error}. Leave out the one "
                    "that is of another model, or measure it into another --out"
                ) from error
            break  # all others are alike
        kept, budget = (str(unit.attrs.get(name, "")) for name in ("weights_kept", "memory_budget"))
        return Serialized(file_content(unlabelled(unit)), known, Row.from_unit(unit), kept, budget)

    def add(self, step: int, prepared: Serialized) -> None:
        """Write a unit whose step is claimed."""
        self.store.write_content(step, prepared.content)
        self.known[step], self._rows[step] = prepared.known, prepared.row

    def row(self, step: int) -> Row | None:
        """Take the row that loggers receive of a unit; None if it was taken before, or was not made."""
        return self._rows.pop(step, None)

    def _read(self, steps: list[int], damaged: dict[int, OSError | ValueError]) -> None:
        for curve in self.store.curves(steps, damaged.__setitem__):
            for row in Row.from_curve(curve) if self.with_rows else ():
                self._rows[row.step] = row
            for i, step in enumerate(curve["step"].values.tolist()):
                self.known[step] = _known(curve, i)


def _known(ds: xr.Dataset, i: int = 0) -> Known:
    """Return what is known of a unit, or of the i-th of a curve."""

    def of(name: str) -> str:
        values = ds.coords[name].values if name in ds.coords else np.asarray(ds.attrs.get(name, ""))
        return str(values if values.ndim == 0 else values[i])

    scores = ds["score"].isel(step=i) if "step" in ds.dims and "score" in ds else ds.get("score")
    by_task = {} if scores is None else dict(zip(scores["task"].values.tolist(), scores.values.tolist(), strict=True))
    named = {name: of(name) for name in ("revision", "files_sha256", "fingerprint", "token_ids_sha256")}
    return Known(likeness(ds), scores={task: x for task, x in by_task.items() if x == x}, **named)
