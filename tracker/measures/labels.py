"""What a Dataset says of itself: the order of its variables, and the attributes of each.

The variables asked for come first, in the order in which `measures=` names them: those on the dashboard, then the rest. Scores,
positions and diagnostics follow. Attributes are `long_name`, `units`, `formula` and `reference`.
"""

import xarray as xr

from tracker.measures.choices import choices
from tracker.measures.coordinates import COORDINATES
from tracker.measures.declaration import DIAGNOSTICS
from tracker.measures.registry import BY_NAME

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
        if described := BY_NAME.get(str(name)) or COORDINATES.get(str(name)):
            values.attrs |= {
                "long_name": described.label,
                "units": described.unit,
                "formula": described.formula,
                "reference": described.reference,
            }
    return ordered
