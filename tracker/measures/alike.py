"""Whether Datasets of several steps were measured alike, so that they make one curve."""

from collections.abc import Sequence
from pathlib import Path

import xarray as xr


def require_one_curve(units: Sequence[xr.Dataset], path: Path) -> None:
    """Check that units, or parts of them, can be joined.

    Raises:
        ValueError: if the units of `path` were measured differently.
    """
    for name, values in (
        ("settings", {unit.attrs.get("settings_sha256", "") for unit in units}),
        ("number of blocks", {unit.sizes.get("layer") for unit in units}),
        ("final norm", {unit.attrs.get("final_norm", "") for unit in units}),
        ("tokens", {unit.attrs.get("tokens", "") for unit in units}),
        (
            "layers compared across tokens",
            {str(unit["pair_layer_other"].values.tolist()) for unit in units if "pair_position" in unit},
        ),
    ):
        if len(values) > 1:
            raise ValueError(f"{path} holds units that differ in their {name} ({values}); they make no curve")
