"""Figures of hidden states: measures of their trajectories over training and depth, principal planes, response to noise.

Medians and quartiles are over prompts and positions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from tracker.analysis.across_models import Results
from tracker.analysis.curves import quartiles, sources
from tracker.analysis.selections import require_labels
from tracker.analysis.variables import evenly_spaced
from tracker.common.errors import UsageError
from tracker.figures.choices import Choices
from tracker.figures.drawing import (
    BLUE,
    ORANGE,
    at_step,
    axis_label,
    label_y,
    legend_below,
    mean_line,
    panels,
    quartile_line,
    scale_y,
    shades,
    training_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tracker.figures.drawing import Plotted


def over_training(
    results: Results, choices: Choices, target: "Axes | None", *, variable: str
) -> "Plotted":
    """Draw medians and quartiles against the training step, one line per result."""
    figure, (axes,) = panels(1, target)
    variable = choices.variable(variable)
    rows = []
    for (name, ds), colour in zip(results.items(), shades(len(results)), strict=True):
        columns = quartile_line(axes, ds[variable], "step", colour, name)
        rows.append(pd.DataFrame({"result": name, **columns}))
    training_axis(axes, *(ds["step"].values for ds in results.values()), scale=choices.axis)
    axes.set_ylabel(axis_label(variable))
    legend_below(axes)
    return figure, pd.concat(rows, ignore_index=True)


def at_layers(
    results: Results,
    choices: Choices,
    target: "Axes | None",
    *,
    variable: str,
    sign: Literal[1, -1] = 1,
) -> "Plotted":
    """Draw medians and quartiles against the training step, at the layers chosen, or an early, a middle and a late one.

    Args:
        sign: -1 draws the negative of the variable.

    Raises:
        UsageError: for a result with too few blocks for a window, or without one at a layer chosen.
    """
    figure, axes = panels(len(results), target, sharey=True)
    variable = choices.variable(variable)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        defined = ds["layer"].values[
            ds[variable].notnull().any(("step", "prompt", "position")).values
        ]
        if not len(defined):
            raise UsageError(
                f"{name} has too few blocks for a window: {variable} is defined nowhere; choose another figure"
            )
        if unknown := sorted({*(choices.layers or ())} - {*defined.tolist()}):
            raise UsageError(
                f"{name} has no window at block {', '.join(map(str, unknown))}; choose from {defined[0]} to {defined[-1]}"
            )
        layers = choices.layers or [int(defined[i]) for i in evenly_spaced(len(defined), 3)]
        for layer, colour in zip(layers, shades(len(layers)), strict=True):
            values = sign * ds[variable].sel(layer=layer, drop=True)
            columns = quartile_line(panel, values, "step", colour, f"block {layer}")
            rows.append(pd.DataFrame({"result": name, "layer": layer, **columns}))
        training_axis(panel, ds["step"].values, scale=choices.axis)
        scale_y(panel, variable)
        panel.set(title=name, ylabel=("−" if sign < 0 else "") + axis_label(variable))
    legend_below(axes[0])
    return figure, pd.concat(rows, ignore_index=True)


def by_depth(
    results: Results, choices: Choices, target: "Axes | None", *, variables: Sequence[str]
) -> "Plotted":
    """Draw medians and quartiles against depth, one line for each of at most four steps; null levels are dotted."""
    shown = [
        (name, ds, choices.variable(variable))
        for variable in variables
        for name, ds in results.items()
    ]
    figure, axes = panels(len(shown), target)
    rows = []
    for panel, (name, ds, variable) in zip(axes, shown, strict=True):
        axis = "depth" if "depth" in ds[variable].dims else "layer"
        steps = evenly_spaced(ds.sizes["step"], 4)
        for i, colour in zip(steps, shades(len(steps)), strict=True):
            step = ds["step"].values[i]
            label = None if np.isnan(step) else f"step {step:,}"
            values = ds[variable].isel(step=i).dropna(axis, how="all")
            columns = quartile_line(panel, values, axis, colour, label)
            columns = {"depth": columns.pop(axis), **columns}
            if (null := f"{variable}_null") in ds:
                level = ds[null].isel(step=i).sel({axis: values[axis]})
                columns["null"] = level.median([dim for dim in level.dims if dim != axis]).values
                panel.plot(columns["depth"], columns["null"], color=colour, ls=":", lw=1.2)
            rows.append(
                pd.DataFrame({"result": name, "variable": variable, "step": step, **columns})
            )
        scale_y(panel, variable)
        panel.set(
            title=name,
            xlabel="State after block l" if axis == "depth" else "Block l",
            ylabel=axis_label(variable),
        )
        if f"{variable}_null" in ds:
            panel.plot([], [], color="0.4", ls=":", lw=1.2, label="null level")
    for panel in axes:
        labels = panel.get_legend_handles_labels()[1]
        if "null level" in labels or (labels and panel is axes[0]):
            legend_below(panel)
    return figure, pd.concat(rows, ignore_index=True)


def by_model(
    results: Results,
    choices: Choices,
    target: "Axes | None",
    *,
    variables: Sequence[str],
    trained: bool = True,
) -> "Plotted":
    """Draw the median and quartiles of each result at its first step and, if `trained`, at its last."""
    figure, axes = panels(len(variables), target)
    rows = []
    for panel, variable in zip(axes, map(choices.variable, variables), strict=True):
        shown = ((0, BLUE, -0.12), (-1, "black", 0.12)) if trained else ((0, BLUE, 0.0),)
        for i, colour, shift in shown:
            for x, (name, ds) in enumerate(results.items()):
                at = ds.isel(step=i)
                low, middle, high = quartiles(at[variable], ("prompt", "position")).values
                bar = [[middle - low], [high - middle]]
                label = ("last step" if i else "first step") if x == 0 else None
                panel.errorbar(
                    x + shift, middle, bar, color=colour, marker="o", ms=4, capsize=2, label=label
                )
                columns = {"step": at["step"].item(), "median": middle, "q25": low, "q75": high}
                rows.append({"result": name, "variable": variable, **columns})
        panel.set_xlim(-0.6, len(results) - 0.4)
        panel.set_xticks(range(len(results)), list(results), rotation=45, ha="right")
        panel.set_ylabel(axis_label(variable))
    legend_below(axes[0])
    return figure, pd.DataFrame(rows)


def principal_planes(results: Results, _: Choices, target: "Axes | None") -> "Plotted":
    """Draw trajectories of the first prompt's tokens on the principal plane of the last states; the last token in orange.

    Raises:
        UsageError: for a result whose first prompt has too few tokens to span a plane.
    """
    shown = [
        (name, ds, i) for name, ds in results.items() for i in evenly_spaced(ds.sizes["step"], 2)
    ]
    figure, axes = panels(len(shown), target)
    rows = []
    for panel, (name, ds, i) in zip(axes, shown, strict=True):
        plane = ds["pca"].isel(step=i, prompt=0).transpose("position", "depth", "component").values
        positions = np.flatnonzero(np.isfinite(plane).all((1, 2)))
        if not len(positions):
            raise UsageError(
                f"the first prompt of {name} has too few tokens to span a plane; measure a longer one first"
            )
        plane = plane[positions]
        last = len(plane) - 1
        colours = [*shades(last), ORANGE]
        labels = {0: "first token", last: "last token"}
        for index, (path, colour) in enumerate(zip(plane, colours, strict=True)):
            panel.plot(
                *path.T,
                color=colour,
                lw=0.8,
                marker=".",
                ms=2.5,
                zorder=3 if index == last else 2,
                label=labels.get(index),
            )
        panel.set(title=at_step(name, ds, i), xlabel="First principal axis")
        token, depth = np.indices(plane.shape[:2]).reshape(2, -1)
        first, second = plane.reshape(-1, 2).T
        columns = {"position": positions[token], "depth": depth, "first": first, "second": second}
        rows.append(pd.DataFrame({"result": name, "step": ds["step"].values[i], **columns}))
    label_y(axes, "Second principal axis")
    legend_below(axes[0])
    return figure, pd.concat(rows, ignore_index=True)


def noise_response(results: Results, _: Choices, target: "Axes | None") -> "Plotted":
    """Draw the cosine similarity of noisy to clean states after the first and the last block, at the last step."""
    figure, axes = panels(len(results), target, sharey=True)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        at = ds["noise_similarity"].isel(step=-1)
        require_labels(at, "depth", (0, 1), "the response to noise")
        for depth, colour in ((1, BLUE), (int(at["depth"][-1]), ORANGE)):
            by_prompt = at.sel(depth=depth, drop=True).mean("position")
            columns = mean_line(panel, by_prompt, sources(ds), colour, f"after block {depth}")
            rows.append(pd.DataFrame({"result": name, "depth": depth, **columns}))
        panel.set(title=name, xlabel="Length of the noise / length of the embedding", xscale="log")
        panel.xaxis.set_major_formatter("{x:g}")
    label_y(axes, "Cosine similarity to the state\nwithout noise")
    legend_below(axes[0])
    return figure, pd.concat(rows, ignore_index=True)
