"""Measure how the blocks of a transformer come to work together while it trains.

>>> import tracker
>>> callable(tracker.measure)
True
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public functions by the room they live in, imported when first asked for: `import tracker` itself pulls in nothing.
_ROOMS = {
    "CouplingCallback": "callback",
    "measure": "measurement",
    "find_blocks": "blocks",
    "open_results": "results",
    "plot": "notebook",
}
__all__ = ["CouplingCallback", "find_blocks", "measure", "open_results", "plot"]

if TYPE_CHECKING:
    from tracker.blocks import find_blocks
    from tracker.callback import CouplingCallback
    from tracker.measurement import measure
    from tracker.notebook import plot
    from tracker.results import open_results


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(f"tracker.{_ROOMS[name]}"), name)
    if name in ("figures", "report"):
        return importlib.import_module(f"tracker.{name}")
    raise AttributeError(f"module 'tracker' has no attribute {name!r}")
