"""What a Dataset says of itself: the order of its variables, and the attributes of each.

The variables asked for come first, in the order in which `measures=` names them: those on the dashboard, then the rest. Scores,
positions and diagnostics follow. Attributes are `long_name`, `units`, `formula` and `reference`.
"""

from collections.abc import Hashable

import xarray as xr

from tracker.measures.choices import choices
from tracker.measures.coordinates import COORDINATES, Coordinate
from tracker.measures.declaration import DIAGNOSTICS, Measure
from tracker.measures.registry import BY_NAME

ADDED = ("long_name", "units", "formula", "reference")
HEADLINE, REST, OTHERS, POSITIONS, LAST = range(5)  # groups of variables, in their order


def labelled(dataset: xr.Dataset) -> xr.Dataset:
    """Return a measured Dataset with its variables in order and described; others keep their attributes."""
    asked = str(dataset.attrs.get("measures", "")).split(", ")
    asked = [*(name for name in asked if name in choices()), *choices()]
    in_registry = {name: i for i, name in enumerate(BY_NAME)}

    def place(name: str) -> tuple[int, int, int]:
        measure = BY_NAME.get(name)
        option = asked.index(measure.option) if measure and measure.option in asked else 0
        if name.startswith(DIAGNOSTICS):
            group = LAST
        elif measure is None:
            group = OTHERS
        elif name in ("token_position", "pair_position"):
            group = POSITIONS
        else:
            group = HEADLINE if measure.dashboard and (not measure.base or measure.option == "tokenwise") else REST
        return group, option, in_registry.get(name, len(in_registry))

    ordered = dataset[sorted(map(str, dataset.data_vars), key=place)].copy().assign_attrs(dataset.attrs)
    ordered = ordered.assign_coords(dataset.coords)
    for name, values in ordered.variables.items():
        if described := _described(name):
            added = described.label, described.unit, described.formula, described.reference
            values.attrs |= dict(zip(ADDED, added, strict=True))
    return ordered


def unlabelled(dataset: xr.Dataset) -> xr.Dataset:
    """Return a Dataset without the attributes that `labelled` adds, which are a quarter of the size of a small file."""
    plain = dataset.copy()
    for name, values in plain.variables.items():
        if _described(name):
            values.attrs = {key: value for key, value in values.attrs.items() if key not in ADDED}
    return plain


def _described(name: Hashable) -> Measure | Coordinate | None:
    return BY_NAME.get(str(name)) or COORDINATES.get(str(name))
