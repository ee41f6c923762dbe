"""The version of the variables' names in a Dataset, and the present names of older Datasets.

Version 1 (the attribute is absent): `expodistance`, `alpha_mean`, `equidistance`, `norm` and their windows included the final
norm in the last state, `expodistance_raw`, `expodistance_raw_window` and so on did not. In version 2, the plain name is that
of the value before the final norm, and `expodistance_normed` and so on include the norm. Diagnostics have a prefix.
The very last token is recorded as "last", also where the caller gave -1, which older Datasets repeat.
"""

import xarray as xr

from tracker.measures.declaration import DIAGNOSTICS
from tracker.measures.registry import MEASURES, UNDEFINED

ATTRIBUTE, VERSION = "names_version", 2


def with_present_names(dataset: xr.Dataset) -> xr.Dataset:
    """Return a measured Dataset with the present names of its variables; one that has them is returned as it is."""
    if dataset.attrs.get("tokens") == "-1":
        dataset = dataset.assign_attrs(tokens="last")
    if int(dataset.attrs.get(ATTRIBUTE, 1)) == VERSION:
        return dataset
    diagnostics = [measure.name for measure in MEASURES if measure.name.startswith(DIAGNOSTICS)]
    present = {name.removeprefix(DIAGNOSTICS): name for name in (*diagnostics, UNDEFINED)}
    dropped: list[str] = []
    for measure in (measure for measure in MEASURES if measure.variant == "normed"):
        before_norm, plain = _older_raw(measure.base), measure.base
        if dataset.attrs.get("final_norm") == "include":
            present[plain] = measure.name
        elif before_norm in dataset:  # equal to it, as no norm was included
            dropped.append(plain)
        present[before_norm] = plain
    dataset = dataset.drop_vars(dropped, errors="ignore")
    dataset = dataset.rename({name: new for name, new in present.items() if name in dataset})
    if "quantity" in dataset.coords:
        counted = dataset["quantity"]
        dataset = dataset.sel(quantity=~counted.isin(dropped))
        quantities = [present.get(str(name), str(name)) for name in dataset["quantity"].values]
        dataset = dataset.assign_coords(quantity=("quantity", quantities, counted.attrs))
    return dataset.assign_attrs({ATTRIBUTE: VERSION})


def _older_raw(name: str) -> str:
    base, window, _ = name.partition("_window")
    return f"{base}_raw{window}"
