"""Figures of hidden states and of other variables by depth: over training, by depth, principal planes, response to noise.

Medians and quartiles are over prompts and positions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.curves import quartiles
from tracker.analysis.selections import require_labels
from tracker.analysis.variables import evenly_spaced
from tracker.common.errors import UsageError
from tracker.figures.choices import Choices
from tracker.figures.drawing import (
    BLUE,
    ORANGE,
    at_step,
    axis_label,
    banded_line,
    first_and_last_steps,
    label_y,
    legend_below,
    of_means,
    of_quartiles,
    panels,
    scale_y,
    shades,
    training_axis,
)

if TYPE_CHECKING:
    from tracker.figures.drawing import Plotted

# The lines of a panel: the label of each, the columns that tell it from others in the table, and its values
Lines = Iterator[tuple[str | None, dict[str, Any], xr.DataArray]]


def quartile_lines(
    results: Results,
    choices: Choices,
    *,
    variables: Sequence[str],
    of: Literal["result", "block", "step"],
    sign: Literal[1, -1] = 1,
) -> "Plotted":
    """Draw medians and quartiles of variables.

    Args:
        of: what a line is of: over training, a result or one of its blocks, which are those chosen, or an early, a middle and a
            late one; by depth, one of at most four steps. All results are in one panel, or a panel is of one result.
        sign: -1 draws the negative of the variables.

    Raises:
        UsageError: for a result with too few blocks for a window, or without one at a block chosen.
    """
    groups = [results] if of == "result" else [{name: ds} for name, ds in results.items()]
    shown = [(choices.variable(name), group) for name in variables for group in groups]
    figure, axes = panels(len(shown), choices.ax, sharey=of == "block")
    rows = []
    for panel, (variable, group) in zip(axes, shown, strict=True):
        lines = list(LINES[of](group, variable, choices))
        for (label, labels, values), colour in zip(lines, shades(len(lines)), strict=True):
            along = next(dim for dim in ("step", "depth", "layer") if dim in values.dims)
            columns = of_quartiles(sign * values, along)
            banded_line(panel, columns, colour, label)
            if of == "step":
                columns = {"depth": columns.pop(along), **columns}
            rows.append(pd.DataFrame({**labels, **columns}))
        if of == "step":
            panel.set_xlabel("State after block l" if along == "depth" else "Block l")
        else:
            training_axis(panel, *(ds["step"].values for ds in group.values()), scale=choices.axis)
        scale_y(panel, variable)
        panel.set_ylabel("−" * (sign < 0) + axis_label(variable))
        panel.set_title("" if of == "result" else next(iter(group)))
        if panel is axes[0] and panel.get_legend_handles_labels()[1]:
            legend_below(panel)
    return figure, rows


def _of_results(group: Results, variable: str, _: Choices) -> Lines:
    for name, ds in group.items():
        yield name, {"result": name}, ds[variable]


def _of_blocks(group: Results, variable: str, choices: Choices) -> Lines:
    ((name, ds),) = group.items()
    values = ds[variable]
    defined = values["layer"].values[values.notnull().any(("step", "prompt", "position")).values]
    if not len(defined):
        raise UsageError(
            f"{name} has too few blocks for a window: {variable} is defined nowhere; choose another figure"
        )
    if unknown := sorted({*(choices.layers or ())} - {*defined.tolist()}):
        raise UsageError(
            f"{name} has no window at block {', '.join(map(str, unknown))}; choose from {defined[0]} to {defined[-1]}"
        )
    for layer in choices.layers or defined[evenly_spaced(len(defined), 3)].tolist():
        yield f"block {layer}", {"result": name, "layer": layer}, values.sel(layer=layer, drop=True)


def _of_steps(group: Results, variable: str, _: Choices) -> Lines:
    ((name, ds),) = group.items()
    along = "depth" if "depth" in ds[variable].dims else "layer"
    for i in evenly_spaced(ds.sizes["step"], 4):
        step = ds["step"].values[i]
        label = None if np.isnan(step) else f"step {step:,}"
        values = ds[variable].isel(step=i).dropna(along, how="all")
        yield label, {"result": name, "variable": variable, "step": step}, values


LINES: dict[str, Callable[[Results, str, Choices], Lines]] = {
    "result": _of_results,
    "block": _of_blocks,
    "step": _of_steps,
}


def first_and_last(
    results: Results, choices: Choices, *, variables: Sequence[str], trained: bool = True
) -> "Plotted":
    """Draw the median and quartiles of each result at its first step and, if `trained`, at its last."""
    figure, axes = panels(len(variables), choices.ax)
    rows = []
    places = np.arange(len(results))
    shown = [(0, "first step", BLUE, 0.0)]
    if trained:
        shown = [(0, "first step", BLUE, -0.12), (-1, "last step", "black", 0.12)]
    for panel, variable in zip(axes, map(choices.variable, variables), strict=True):
        for i, label, colour, shift in shown:
            of_step = [ds[variable].isel(step=i) for ds in results.values()]
            spread = np.stack([quartiles(at, ("prompt", "position")).values for at in of_step], 1)
            low, middle, high = spread
            bars = [middle - low, high - middle]
            style = {"fmt": "o", "color": colour, "ms": 4, "capsize": 2, "label": label}
            panel.errorbar(places + shift, middle, bars, **style)
            columns = {"result": list(results), "variable": variable}
            columns["step"] = [at["step"].item() for at in of_step]
            rows.append(pd.DataFrame({**columns, "median": middle, "q25": low, "q75": high}))
        panel.set_xlim(-0.6, len(results) - 0.4)
        panel.set_xticks(places, list(results), rotation=45, ha="right")
        panel.set_ylabel(axis_label(variable))
    legend_below(axes[0])
    return figure, rows


def principal_planes(results: Results, choices: Choices) -> "Plotted":
    """Draw trajectories of the first prompt's tokens on the principal plane of the last states; the last token in orange.

    Raises:
        UsageError: for a result whose first prompt has too few tokens to span a plane.
    """
    shown = first_and_last_steps(results)
    figure, axes = panels(len(shown), choices.ax)
    rows = []
    for panel, (name, ds, i) in zip(axes, shown, strict=True):
        plane = ds["pca"].isel(step=i, prompt=0).dropna("position")
        positions = plane["position"].values
        if not len(positions):
            raise UsageError(
                f"the first prompt of {name} has too few tokens to span a plane; measure a longer one first"
            )
        last = len(positions) - 1
        colours = [*shades(last), ORANGE]
        labels = {0: "first token; the later, the lighter", last: "last token"}
        for token, (position, colour) in enumerate(zip(positions, colours, strict=True)):
            first, second = plane.sel(position=position).transpose("component", "depth").values
            style = {"color": colour, "lw": 0.8, "marker": ".", "ms": 2.5}
            panel.plot(
                first, second, zorder=3 if token == last else 2, label=labels.get(token), **style
            )
            columns = {"position": position, "depth": plane["depth"].values}
            columns |= {"first": first, "second": second}
            rows.append(pd.DataFrame({"result": name, "step": ds["step"].values[i], **columns}))
        panel.set(title=at_step(name, ds, i), xlabel="First principal axis")
    label_y(axes, "Second principal axis")
    legend_below(axes[0])
    return figure, rows


def noise_response(results: Results, choices: Choices) -> "Plotted":
    """Draw the cosine similarity of noisy to clean states after the first and the last block, at the last step."""
    figure, axes = panels(len(results), choices.ax, sharey=True)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        at = ds["noise_similarity"].isel(step=-1)
        require_labels(at, "depth", (0, 1), "the response to noise")
        for depth, colour in ((1, BLUE), (int(at["depth"][-1]), ORANGE)):
            by_prompt = at.sel(depth=depth, drop=True).mean("position")
            columns = of_means(by_prompt, "noise", ds)
            banded_line(panel, columns, colour, f"after block {depth}")
            rows.append(pd.DataFrame({"result": name, "depth": depth, **columns}))
        panel.set(title=name, xlabel="Length of the noise / length of the embedding", xscale="log")
        panel.xaxis.set_major_formatter("{x:g}")
    label_y(axes, "Cosine similarity to the state\nwithout noise")
    legend_below(axes[0])
    return figure, rows
