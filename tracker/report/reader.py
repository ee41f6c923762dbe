"""A reader of stores for the page: it reads each unit once, unless its file is replaced, and keeps only summaries."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

    from tracker.results import Store

Signature = tuple[int, int, int]


class Reader:
    """A cache of the summaries of units that were read or added."""

    def __init__(self) -> None:
        self.known: dict[Path, tuple[Signature, xr.Dataset]] = {}

    def read(self, directory: Path) -> "xr.Dataset":
        """Return the summary of a store's results, along `step`.

        Raises:
            FileNotFoundError: if there are none.
            ValueError: if a unit is damaged, or the units make no curve.
        """
        from tracker.results import Store, join, require_steps

        store = Store(directory)
        by_step: dict[int, xr.Dataset] = {}
        for step in require_steps(store):
            known = self.known.get(store.file(step))
            if known is None or known[0] != signature(store.file(step)):
                self.unit(store, step)
            by_step[step] = self.known[store.file(step)][1].copy()
        return join(by_step, store.path)

    def unit(self, store: "Store", step: int) -> "xr.Dataset":
        """Read a unit and cache its summary.

        Raises:
            ValueError: if the unit is damaged.
        """
        from tracker.analysis.reduction import reduced

        before = signature(store.file(step))  # if it is replaced while it is read, it is read again
        unit = store.read(step)
        self._know(store.file(step), before, reduced(unit))
        return unit

    def hold(self, store: "Store", step: int, summarised: "xr.Dataset") -> None:
        """Cache the summary of a unit as that of its file, which then need not be read."""
        self._know(store.file(step), signature(store.file(step)), summarised)

    def summary(self, store: "Store", step: int) -> "xr.Dataset":
        """Return the cached summary of a unit."""
        return self.known[store.file(step)][1]

    def _know(self, file: Path, signed: Signature, summarised: "xr.Dataset") -> None:
        # The texts of 1,200 prompts are larger than all else: steps that have the same share them.
        other = next((other for known, (_, other) in self.known.items() if known.parent == file.parent), None)
        for name in ("prompt_text", "prompt_source"):
            if other is not None and name in other.coords and name in summarised.coords:
                texts = other[name].variable
                if texts.equals(summarised[name].variable):
                    summarised = summarised.assign_coords({name: texts})
        self.known[file] = (signed, summarised)


def signature(file: Path) -> Signature:
    """Return an identifier that changes when a file is replaced."""
    status = file.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
