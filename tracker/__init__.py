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
    "curves": "analysis.curves",
    "Watch": "training.watch",
    "Store": "store",
    "measure": "measurement",
    "null_level": "analysis.null_levels",
    "find_blocks": "blocks.find",
    "open_results": "store",
    "plot": "figures.selection",
    "scalars": "analysis.curves",
    "summary": "analysis.summary",
    "prompts": "walk.prompts",
    "figures": "figures",
    "report": "report",
}
__all__ = [
    "CouplingCallback",
    "Store",
    "TransformersCallback",
    "Watch",
    "__version__",
    "curves",
    "find_blocks",
    "measure",
    "null_level",
    "open_results",
    "plot",
    "scalars",
    "summary",
    "prompts",
]

if TYPE_CHECKING:
    from tracker.analysis.curves import curves, scalars
    from tracker.analysis.null_levels import null_level
    from tracker.analysis.summary import summary
    from tracker.blocks.find import find_blocks
    from tracker.figures.selection import plot
    from tracker.measurement import measure
    from tracker.store import Store, open_results
    from tracker.training.callback import CouplingCallback
    from tracker.training.transformers import TransformersCallback
    from tracker.training.watch import Watch
    from tracker.walk.prompts import prompts


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'tracker' has no attribute {name!r}")
    try:
        imported = importlib.import_module(f"tracker.{module}")
    except ModuleNotFoundError as error:
        from tracker.common.errors import missing_extra

        raise missing_extra(error, f"tracker.{name}") from error
    return getattr(imported, name, imported)  # a module is named as itself


def __dir__() -> list[str]:
    """Return the public names, which are imported on first use."""
    return sorted({*_MODULES, *(name for name in globals() if name.startswith("__"))})
