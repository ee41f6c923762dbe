"""Which results are of models that are not independent, so that a fit over models may count them once.

Twins have the same architecture, sizes and name but for `-deduped` or `-seedN` (Pythia 70m and 70m-deduped; one model measured
twice). Sizes of one suite share data and recipe, which no name proves: the attribute `cluster` of results, or `--clusters`, says
of any others that they belong together.
"""

import re
from collections.abc import Mapping

import numpy as np
import xarray as xr

CLUSTERS_HELP = (
    "which results are not independent, as NAME=CLUSTER,NAME=CLUSTER: fits are also made of each cluster's mean; default: "
    "twins, told by their names (-deduped, -seedN) and sizes"
)
TWIN = re.compile(r"[-_](deduped|seed[-_]?\d+)(?=[-_]|$)", re.IGNORECASE)


def clusters(results: Mapping[str, xr.Dataset]) -> np.ndarray:
    """A label for each of the results: its attribute `cluster`, else the name of its first twin, often itself."""
    first: dict[tuple, str] = {}
    return np.array(
        [str(ds.attrs.get("cluster") or first.setdefault(_twin(name, ds), name)) for name, ds in results.items()]
    )


def _twin(result: str, ds: xr.Dataset) -> tuple:
    """What twins share; results whose model has no name have none."""
    name = str(ds.attrs.get("suite") or ds.attrs.get("model_name") or "").rstrip("/").rpartition("/")[2].lower()
    if not name:
        return (result,)
    sizes = (ds.attrs.get("model_class"), ds.sizes.get("layer"), ds.attrs.get("width"), ds.attrs.get("parameters"))
    return (TWIN.sub("", name), *map(str, sizes))


def independence(results: Mapping[str, xr.Dataset]) -> str:
    """What a reader of a fit over these results should know, in one or two sentences."""
    classes, labels = {ds.attrs.get("model_class") for ds in results.values()}, clusters(results)
    several = "s" if len(classes) > 1 else ""
    said = (
        f"{len(results)} models of {len(classes)} architecture{several}: p and intervals take models as independent, "
        "which sizes of one suite are not quite."
    )
    names = np.array(list(results))
    together = [names[labels == label] for label in dict.fromkeys(labels)]
    same = "; ".join(", ".join(members) for members in together if len(members) > 1)
    return f"{said} Averaged, to count once: {same}." if same else said


def assigned(results: Mapping[str, xr.Dataset], given: str | None) -> dict[str, xr.Dataset]:
    """The results with the attribute `cluster` as "NAME=CLUSTER,NAME=CLUSTER" gives it; others keep what they have.

    Raises:
        ValueError: for what is not of this form, or names none of the results.
    """
    pairs = [pair.strip().rpartition("=") for pair in (given or "").split(",") if pair.strip()]
    for name, equals, cluster in pairs:
        if not (equals and cluster and name in results):
            raise ValueError(
                f"--clusters {given}: {(name + equals + cluster)!r} is not NAME=CLUSTER with one of {', '.join(results)}"
            )
    labels = {name: cluster for name, _, cluster in pairs}
    return {name: ds.assign_attrs(cluster=labels[name]) if name in labels else ds for name, ds in results.items()}
