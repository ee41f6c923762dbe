"""What a reader should know before trusting the page's curves, in sentences, and how its numbers were measured, as a table."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr

from checkpoints.integrity import describe_repeat
from checkpoints.suites import UNTRAINED
from tracker.analysis.conventions import attribute_values
from tracker.analysis.statistics import layers_in_words, suspect
from tracker.measures import registry
from tracker.report import quantize
from tracker.results import Store

NAMED = 4  # of a list of steps or blocks, how many are named before it is cut short


def doubts(ds: xr.Dataset, store: Store) -> list[str]:
    """List the warnings about one store: skipped steps, suspect and repeated weights, fallbacks, missing certificates,
    undefined values.
    """
    steps = [int(step) for step in ds["step"].values]
    lines = [f"Step {step:,} has no results: {why}" for step, why in store.skipped().items()]
    lines += [f"Step {step:,} is suspect: {why}." for step, why in zip(steps, suspect(ds), strict=True) if why]
    revisions = np.broadcast_to(ds["revision"].values, len(steps)) if "revision" in ds.coords else [""] * len(steps)
    lines += [
        f"Step {step:,} is no published checkpoint but a random initialisation ({revision})."
        for step, revision in zip(steps, revisions, strict=True)
        if str(revision).startswith(UNTRAINED)
    ]
    repeated = ds["repeats"].values if "repeats" in ds.coords else [-1] * len(steps)
    same = [describe_repeat(step, int(earlier)) for step, earlier in zip(steps, repeated, strict=True) if earlier >= 0]
    lines += [f"{line[0].upper()}{line[1:]}." for line in same]
    if "jacobians_count" in ds:
        lines += _certificates(ds)
    undefined = ds[registry.UNDEFINED].sum("step")
    counts = [f"{int(n):,} of {q}" for q, n in zip(ds["quantity"].values, undefined.values, strict=True) if n > 0]
    if counts:
        lines.append(f"Undefined values, left out of means and quartiles: {', '.join(counts)}.")
    return lines


def _certificates(ds: xr.Dataset) -> Iterator[str]:
    count = int(ds["jacobians_count"].sum())
    missing = ds["jacobians_count"] - ds["sliced_count"]
    if (whole := missing.sum("step")).any():
        reasons = {
            int(layer): why for text in attribute_values(ds, "fallbacks") for layer, why in json.loads(text).items()
        }
        blocks = [int(layer) for layer in ds["layer"].values[whole.values > 0]]
        said = "; ".join(dict.fromkeys(reasons[block] for block in blocks if block in reasons)) or "no reason was kept"
        yield (
            f"Fallback: {int(whole.sum()):,} of {count:,} Jacobians, of block {_listed(blocks)}, were taken over the full "
            f"sequence and not from single rows, which is as exact and slower ({said})."
        )
    formed, complete = (int(ds[f"{name}_count"].sum()) for name in ("formed", "complete"))
    if formed < count:
        yield (
            f"Probabilistic: {count - formed:,} of {count:,} Jacobians were known by products alone; nothing proves that none of "
            "their top singular vectors was missed."
        )
    if complete < count:
        yield f"Incomplete: {count - complete:,} of {count:,} sets of top singular vectors did not pass their certificate."


def lacking(ds: xr.Dataset) -> list[str]:
    """List what these results lack, and the command that adds it."""
    again = "python -m tracker.pythia --model … --measures {} --out OTHER, or measures= of the callback"
    usual = ",".join(registry.defaults())
    missing = [option for option in registry.OPTIONS if not _has(ds, option.name)]
    lines = [
        f"{option.text}: {again.format(usual if option.default else f'{usual},{option.name}')}"
        for option in sorted(missing, key=lambda option: option.default)
    ]
    if ds.sizes.get("layer") == 1:
        lines.append("pairs of layers: one block was measured")
    return lines + (["benchmark scores: a walk's --scores FILE joins them"] if "score" not in ds else [])


def _has(ds: xr.Dataset, option: str) -> bool:
    """Whether a summary has something that this choice of `measures=` adds."""
    names = tuple(measure.name for measure in registry.MEASURES if measure.option == option)
    return any(str(name) in names or str(name).startswith(tuple(f"{n}_" for n in names)) for name in ds.data_vars)


def provenance(ds: xr.Dataset, store: Store) -> list[tuple[str, str]]:
    """Return the rows of the table: settings, attributes, certificates, counts of undefined values, commits."""
    rows = [("results", store.path.resolve().name)]
    if store.settings.is_file():
        rows += [(f"asked for: {name}", str(value)) for name, value in store.read_settings().items()]
    # Sorted, as files give attributes back in an order of their own.
    rows += [(name.replace("_", " "), str(value)) for name, value in sorted(ds.attrs.items()) if name != "blocks"]
    if "pair_position" in ds:
        rows.append(("layers compared across tokens", layers_in_words(ds)))
    if "jacobians_count" in ds:
        names = ("jacobians", "sliced", "complete", "formed")
        count, sliced, complete, formed = (int(ds[f"{name}_count"].sum()) for name in names)
        rows += [
            ("block Jacobians", f"{count:,}, of which {sliced:,} from single rows, the rest over the full sequence"),
            (
                "complete top-K sets",
                f"{complete:,} of {count:,}; certified by Cholesky where the Jacobian was formed, {formed:,} times",
            ),
            ("largest residual of a triplet / s₁", f"{float(ds['residual_max'].max()):.1e}"),
            ("largest error of a value check", f"{float(ds['value_error_max'].max()):.1e}"),
            ("largest error of a derivative check", f"{float(ds['derivative_error_max'].max()):.1e}"),
        ]
    totals = {str(q): int(ds[registry.UNDEFINED].sel(quantity=q).sum()) for q in ds["quantity"].values}
    rows.append(("undefined values", ", ".join(f"{q}: {n:,}" for q, n in totals.items() if n) or "none"))
    if "commit" in ds.coords:
        commits = zip(ds["step"].values, np.broadcast_to(ds["commit"].values, ds.sizes["step"]), strict=True)
        rows.append(("commits", ", ".join(f"step {step}: {str(commit)[:8]}" for step, commit in commits if commit)))
    return rows


def carried(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the precision of the page's arrays, and the steps that it leaves out for its size."""
    arrays = list(quantize.carried(models))
    errors = [array["error"] for array in arrays if array["bits"] == 16]
    said = "Curves are the store's own numbers in float64; values by depth and prompt are float32."
    if errors:
        said += (
            " Matrices are whole numbers of 16 bits over each step's range: the largest relative error on this page is "
            f"{max(errors):.1e}."
        )
    if any(array["bits"] == 8 for array in arrays):
        said += " |A| is 8 bits over each matrix's own range: at most 0.2 % of that range off."
    for name, data in models.items():
        fewest = min((len(array["steps"]) for array in quantize.carried(data)), default=len(data["steps"]))
        if fewest < len(data["steps"]):
            said += (
                f" To keep the page small, it carries the largest arrays of {name} at {fewest} or more of {len(data['steps'])} "
                "steps, evenly spaced; a chart says where it shows an earlier step than the one chosen."
            )
    return said


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:NAMED]))
    return shown + (f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else "")
