"""Conventions of a measurement, which must be equal in all results that are compared or drawn together.

With the final norm in the last block, measures of one model differ from those without it; so do those of another dtype, of
other tokens and of other inputs.
"""

from collections.abc import Mapping, Sequence

import xarray as xr

from tracker.errors import UsageError
from tracker.measures.alike import attribute_values

CONVENTIONS = ("final_norm", "dtype", "precision", "tokens", "inputs_sha256")  # attributes


def differing_conventions(
    results: Mapping[str, xr.Dataset], may_differ: Sequence[str] = ()
) -> dict[str, dict[str, str]]:
    """Return the conventions in which results differ, each with the value that every result has.

    Args:
        may_differ: those of `CONVENTIONS` that are not compared.
    """
    held = {
        key: {name: ", ".join(attribute_values(ds, key)) or "not recorded" for name, ds in results.items()}
        for key in CONVENTIONS
        if key not in may_differ
    }
    return {key: values for key, values in held.items() if len(set(values.values())) > 1}


def describe_differences(results: Mapping[str, xr.Dataset]) -> list[str]:
    """Return a text for each convention in which results differ."""
    lines = []
    for key, held in differing_conventions(results).items():
        shown = {name: value[:12] if key == "inputs_sha256" else value for name, value in held.items()}
        said = "; ".join(f"{name}: {value}" for name, value in shown.items())
        lines.append(f"{key.removesuffix('_sha256').replace('_', ' ')} ({said})")
    return lines


def require_same_conventions(results: Mapping[str, xr.Dataset], may_differ: Sequence[str] = ()) -> None:
    """Refuse results that were measured by different conventions.

    Raises:
        UsageError: naming the first convention that differs and its value in each result.
    """
    for key, values in differing_conventions(results, may_differ).items():
        listed = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise UsageError(f"the results differ in {key} ({listed}); give results measured by the same conventions")
