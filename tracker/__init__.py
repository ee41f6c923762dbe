"""Measure how the blocks of a transformer come to work together while it trains.

>>> import tracker
>>> callable(tracker.measure)
True
"""

import importlib
from typing import TYPE_CHECKING, Any

from tracker.version import __version__

# Public names and their modules, imported on first use: `import tracker` itself imports nothing heavy.
_MODULES = {
    "CouplingCallback": "training.callback",
    "measure": "measurement",
    "find_blocks": "blocks.find",
    "open_results": "results",
    "plot": "figures.notebook",
}
__all__ = ["CouplingCallback", "__version__", "find_blocks", "measure", "open_results", "plot"]

if TYPE_CHECKING:
    from tracker.blocks.find import find_blocks
    from tracker.figures.notebook import plot
    from tracker.measurement import measure
    from tracker.results import open_results
    from tracker.training.callback import CouplingCallback


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"tracker.{_MODULES[name]}"), name)
    if name in ("figures", "report", "statistics"):
        return importlib.import_module(f"tracker.{name}")
    raise AttributeError(f"module 'tracker' has no attribute {name!r}")
