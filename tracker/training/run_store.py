"""The store of a training run: one run per directory, continued when the run is resumed."""

from collections.abc import Mapping
from typing import Any

from tracker.capture.inputs import whole_numbers
from tracker.measures.settings import Settings
from tracker.provenance import SCHEMA
from tracker.results import Store


def identity(settings: Settings, weights: str) -> dict[str, Any]:
    """Return the settings that all units of the store share."""
    shared = {name: value for name, value in vars(settings).items() if name not in ("dtype", "memory_budget")}
    if not settings.asks("tokenwise"):
        del shared["pair_layers"]  # keeps the identity of stores written before this setting existed
    for name in ("k", "tokens"):
        if shared[name] is not None and not isinstance(shared[name], str):
            shared[name] = whole_numbers(shared[name])
    return {"schema": SCHEMA, **shared, "dtype": str(settings.dtype), "weights": weights}


def claim(store: Store, settings: Mapping[str, Any], step: int, resumed: bool) -> str | None:
    """Prepare a store for a run that starts at `step`: check its settings and set later units aside.

    Returns:
        The reason why the store can't be used, or None.
    """
    steps = store.steps()
    if steps and not resumed:
        return (
            f"{store.path} holds the units of another run (up to step {steps[-1]}); choose another save_dir, or "
            "resume that run from its checkpoint: trainer.fit(..., ckpt_path=...)"
        )
    try:
        store.settle(settings)
        store.set_aside([later for later in steps if later > step])
    except (ValueError, OSError) as error:
        return f"save_dir can't be used: {error}"
    return None
