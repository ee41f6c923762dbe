"""Clusters of results that are not independent. A fit over models is repeated with one point per cluster, its mean.

Variants of one model form a cluster: same class, depth, width, parameter count, and name up to `-deduped`, `-seedN`,
`-data-seedN` or `-weight-seedN` (Pythia 70m and 70m-deduped; one model measured twice). Models of one suite also share data and
recipe, which their names do not show: the attribute `cluster` of a result, or `--clusters`, assigns other clusters.
"""

import re
from collections.abc import Mapping

import numpy as np
import xarray as xr

from tracker.errors import UsageError

VARIANT = re.compile(r"[-_](deduped|((data|weight)[-_])?seed[-_]?\d+)(?=[-_]|$)", re.IGNORECASE)


def cluster_labels(results: Mapping[str, xr.Dataset]) -> np.ndarray:
    """Return a label for each result: its attribute `cluster`, else the name of the first variant of the same model."""
    first: dict[tuple, str] = {}
    return np.array(
        [str(ds.attrs.get("cluster") or first.setdefault(_model(name, ds), name)) for name, ds in results.items()]
    )


def _model(result: str, ds: xr.Dataset) -> tuple:
    """Return a key that variants of one model share; a model without a name has no variants."""
    name = str(ds.attrs.get("suite") or ds.attrs.get("model_name") or "").rstrip("/").rpartition("/")[2].lower()
    if not name:
        return (result,)
    sizes = (ds.attrs.get("model_class"), ds.sizes.get("layer"), ds.attrs.get("width"), ds.attrs.get("parameters"))
    return (VARIANT.sub("", name), *map(str, sizes))


def independence_note(results: Mapping[str, xr.Dataset]) -> str:
    """State, for readers of a fit over these results, how independent they are and which of them are averaged."""
    classes, labels = {ds.attrs.get("model_class") for ds in results.values()}, cluster_labels(results)
    plural = "s" if len(classes) > 1 else ""
    note = (
        f"{len(results)} models of {len(classes)} architecture{plural}: p and intervals treat models as independent, although "
        "models of one suite share data and training recipe."
    )
    names = np.array(list(results))
    clusters = [names[labels == label] for label in dict.fromkeys(labels)]
    averaged = "; ".join(", ".join(members) for members in clusters if len(members) > 1)
    return f"{note} Clusters averaged in the second fit: {averaged}." if averaged else note


def assign_clusters(results: Mapping[str, xr.Dataset], given: str | None) -> dict[str, xr.Dataset]:
    """Set the attribute `cluster` of results as "NAME=CLUSTER,NAME=CLUSTER" gives it; the others are returned as they are.

    Raises:
        UsageError: for an entry not of this form, or with a name that is not among the results.
    """
    pairs = [pair.strip().rpartition("=") for pair in (given or "").split(",") if pair.strip()]
    for name, equals, cluster in pairs:
        if not (equals and cluster and name in results):
            raise UsageError(
                f"--clusters {given}: {(name + equals + cluster)!r} is not NAME=CLUSTER with one of {', '.join(results)}"
            )
    labels = {name: cluster for name, _, cluster in pairs}
    return {name: ds.assign_attrs(cluster=labels[name]) if name in labels else ds for name, ds in results.items()}
