"""A reader of stores for the page: it reads each unit once, unless its file is replaced, and keeps the units reduced."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr

Signature = tuple[int, int, int]


class Reader:
    """A cache of the reduced units of stores."""

    def __init__(self) -> None:
        self.known: dict[Path, tuple[dict[int, Signature], xr.Dataset]] = {}  # by directory

    def read(self, directory: Path) -> "xr.Dataset":
        """Return the results of a store, `reduced`, along `step`.

        Raises:
            FileNotFoundError: if there are none.
            ValueError: if a unit is damaged, or the units make no curve.
        """
        from tracker.analysis.reduction import reduced
        from tracker.results import Store, join, require_steps

        store = Store(directory)
        # Taken before reading: a unit that is replaced meanwhile is read again next time.
        signatures = {step: signature(store.file(step)) for step in require_steps(store)}
        before, curve = self.known.get(directory, ({}, None))
        kept = [step for step, of in signatures.items() if before.get(step) == of]
        changed = [step for step in signatures if step not in kept]
        if changed or len(kept) < len(before):
            parts = [] if curve is None or not kept else [curve.sel(step=kept)]
            curve = join([*parts, *map(reduced, store.curves(changed))], directory)
            self.known[directory] = signatures, curve
        assert curve is not None
        return curve


def signature(file: Path) -> Signature:
    """Return an identifier that changes when a file is replaced."""
    status = file.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
