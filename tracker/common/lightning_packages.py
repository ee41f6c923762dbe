"""Lightning under both names of its package, `lightning.pytorch` and `pytorch_lightning`, whose classes are not related.

Classes are looked up in the modules that the program has imported, so that the package that it does not use is not imported.
"""

import sys
from typing import Any

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
PREFIXES = ("lightning.", "lightning_fabric.", "pytorch_lightning.")  # of the names of their modules


def is_lightning(value: Any, *names: str) -> bool:
    """Whether a value is of one of Lightning's classes, named within the package, such as "loggers.WandbLogger".

    >>> is_lightning(object(), "Trainer", "loggers.WandbLogger")
    False
    """
    return isinstance(value, classes(*names))


def classes(*names: str) -> tuple[type, ...]:
    """Return the classes of some names, of each package that is imported and has them."""
    paths = [f"{package}.{name}".rpartition(".") for package in PACKAGES for name in names]
    found = (getattr(sys.modules.get(module), name, None) for module, _, name in paths)
    return tuple(kind for kind in found if kind is not None)
