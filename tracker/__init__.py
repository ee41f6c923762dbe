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
    "TransformersCallback": "training.transformers",
    "coupling_penalty": "training.penalty",
    "Watch": "training.watch",
    "Store": "results",
    "measure": "measurement",
    "find_blocks": "blocks.find",
    "open_results": "results",
    "plot": "figures.notebook",
}
_SUBMODULES = {
    "figures": "figures",
    "report": "report",
    "schedules": "training.schedule",
    "statistics": "statistics",
}
__all__ = [
    "CouplingCallback",
    "Store",
    "TransformersCallback",
    "Watch",
    "__version__",
    "coupling_penalty",
    "find_blocks",
    "measure",
    "open_results",
    "plot",
]

if TYPE_CHECKING:
    from tracker.blocks.find import find_blocks
    from tracker.figures.notebook import plot
    from tracker.measurement import measure
    from tracker.results import Store, open_results
    from tracker.training.callback import CouplingCallback
    from tracker.training.penalty import coupling_penalty
    from tracker.training.transformers import TransformersCallback
    from tracker.training.watch import Watch


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"tracker.{_MODULES[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"tracker.{_SUBMODULES[name]}")
    raise AttributeError(f"module 'tracker' has no attribute {name!r}")
