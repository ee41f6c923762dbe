"""The kinds of plots that the paper's figures are made of. Each gives the figure and the numbers it plots, as a table.

Results come by name, each with a `step` dimension; "first" and "last" are its first and last steps. Coupling is minus
mis-coupling. Bands and bars: 95 % t intervals of means over prompts, clustered by their sources where results know them
(`regression.clustered_mean`); quartiles where medians are drawn.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.regression import holm, linear_fit, mean_interval, onset
from tracker.analysis.statistics import inverse_fit, null_matrix, over_pairs, quartiles, sources
from tracker.figures.drawing import banded_line, fitted_line, panels, shades, training_axis
from tracker.figures.palette import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Plotted = tuple[Figure, pd.DataFrame]


def coupling_over_training(results: Results, measure: str, pairs: str, k: int) -> "Plotted":
    """Mean over prompts, its interval, the null level, and the step at which the curve leaves it."""
    figure, axes = panels(len(results), sharey=True)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        by_prompt = prompt_couplings(ds, measure, pairs, k)
        null = by_prompt["null"].mean("prompt").values
        mean = by_prompt["coupling"].mean("prompt").values
        step, source = ds["step"].values, sources(ds)
        low, high = mean_interval(by_prompt["coupling"].transpose("step", "prompt").values, source)
        departure = (by_prompt["coupling"] - by_prompt["null"]).transpose("step", "prompt").values
        left = onset(step, departure, source)
        banded_line(panel, step, mean, low, high, BLUE)
        panel.plot(step, null, color=GREY, ls=":", label="null level")
        if np.isfinite(left["step"]):
            panel.axvspan(left["low"], left["high"], color=ORANGE, alpha=0.2, lw=0)
            earlier, later = left["between"]
            panel.axvline(left["step"], color=ORANGE, lw=1, label=f"onset: steps {earlier:,g} to {later:,g}")
        training_axis(panel, step[-1])
        panel.set_title(name, fontsize=9)
        panel.legend(fontsize=7)
        columns = {"step": step, "coupling": mean, "low": low, "high": high, "null": null, "onset": left["step"]}
        columns |= {"onset_low": left["low"], "onset_high": left["high"]}
        rows.append(pd.DataFrame({"result": name, **columns}))
    figure.supylabel(f"−{measure}, K = {k}", fontsize=9)
    return figure, pd.concat(rows, ignore_index=True)


def layer_graph(results: Results, measure: str, k: int) -> "Plotted":
    """Layers as nodes on a circle; a line's width and opacity: how much more than their null level two layers couple."""
    shown = [(name, ds, i) for name, ds in results.items() for i in _some(ds.sizes["step"], 3)]
    figure, axes = panels(len(shown))
    rows = []
    for name, ds, i in shown:
        at = ds.isel(step=i).sel(k=k)
        gain = (at[f"{measure}_null"] - at[measure]).mean(("prompt", "token")).transpose("layer", "layer_other").values
        gain = (gain + gain.T) / 2  # an edge has no direction
        first, second = np.triu_indices(len(gain), 1)
        step = int(ds["step"][i])
        edges = {"layer": first + 1, "layer_other": second + 1, "coupling_above_null": gain[first, second]}
        rows.append(pd.DataFrame({"result": name, "step": step, **edges}))
    table = pd.concat(rows, ignore_index=True)
    top = max(table["coupling_above_null"].max(), np.finfo(float).tiny)
    for panel, part, (name, ds, i) in zip(axes, rows, shown, strict=True):
        angle = np.pi / 2 - 2 * np.pi * np.arange(ds.sizes["layer"]) / ds.sizes["layer"]
        x, y = np.cos(angle), np.sin(angle)
        for a, b, value in part[["layer", "layer_other", "coupling_above_null"]].itertuples(index=False):
            weight = max(0.0, value / top)
            panel.plot(x[[a - 1, b - 1]], y[[a - 1, b - 1]], color=BLUE, lw=0.3 + 2.5 * weight, alpha=weight, zorder=1)
        panel.scatter(x, y, s=90, color="white", edgecolor=GREY, zorder=2)
        for layer in range(len(x)):
            panel.text(x[layer], y[layer], str(layer + 1), ha="center", va="center", fontsize=6, zorder=3)
        panel.set(aspect="equal", title=f"{name}, step {int(ds['step'][i]):,}")
        panel.title.set_fontsize(8)
        panel.axis("off")
    return figure, table


def by_depth(results: Results, variables: Mapping[str, str], log: Sequence[str] = (), count: int = 4) -> "Plotted":
    """Medians and quartiles over prompts and positions against depth, a line for each of some steps.

    Args:
        variables: name in the results -> what it is, for the axis.
    """
    shown = [(name, ds, variable) for variable in variables for name, ds in results.items()]
    figure, axes = panels(len(shown))
    rows = []
    for panel, (name, ds, variable) in zip(axes, shown, strict=True):
        values = ds[variable]
        axis = "depth" if "depth" in values.dims else "layer"
        steps = _some(ds.sizes["step"], count)
        for i, colour in zip(steps, shades(len(steps)), strict=True):
            over = tuple(dim for dim in values.dims if dim in ("prompt", "position", "token"))
            spread = quartiles(values.isel(step=i), over)
            low, middle, high = (spread.sel(statistic=s).values for s in ("q25", "median", "q75"))
            step = int(ds["step"][i])
            banded_line(panel, values[axis], middle, low, high, colour, f"step {step:,}")
            columns = {"depth": values[axis].values, "median": middle, "q25": low, "q75": high}
            rows.append(pd.DataFrame({"result": name, "variable": variable, "step": step, **columns}))
        if variable in log:
            panel.set_yscale("log")
        panel.set_title(name, fontsize=8)
        panel.set_xlabel(axis, fontsize=8)
        panel.set_ylabel(variables[variable], fontsize=8)
    axes[0].legend(fontsize=6)
    return figure, pd.concat(rows, ignore_index=True)


def at_depths(results: Results, variable: str, label: str, sign: int = 1, log: bool = False) -> "Plotted":
    """Medians and quartiles over prompts and positions against the training step, at an early, a middle and a late layer."""
    figure, axes = panels(len(results), sharey=True)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        defined = ds["layer"].values[ds[variable].notnull().any(("step", "prompt", "position")).values]
        if not len(defined):
            raise ValueError(f"{name} has too few blocks for a window: {variable} is nowhere defined")
        layers = [int(defined[i]) for i in _some(len(defined), 3)]
        for layer, colour in zip(layers, shades(len(layers)), strict=True):
            spread = quartiles(sign * ds[variable].sel(layer=layer), ("prompt", "position")).transpose(
                "statistic", "step"
            )
            low, middle, high = spread.values
            banded_line(panel, ds["step"], middle, low, high, colour, f"layer {layer}")
            columns = {"step": ds["step"].values, "median": middle, "q25": low, "q75": high}
            rows.append(pd.DataFrame({"result": name, "layer": layer, **columns}))
        training_axis(panel, ds["step"].values[-1])
        if log:
            panel.set_yscale("log")
        panel.set_title(name, fontsize=8)
        panel.set_ylabel(label, fontsize=8)
    axes[0].legend(fontsize=7)
    return figure, pd.concat(rows, ignore_index=True)


def over_training(results: Results, variable: str, label: str) -> "Plotted":
    """Medians and quartiles over prompts and positions against the training step, a line for each result."""
    figure, (axes,) = panels(1)
    rows = []
    for (name, ds), colour in zip(results.items(), shades(len(results)), strict=True):
        spread = quartiles(ds[variable], ("prompt", "position")).transpose("step", "statistic")
        low, middle, high = spread.values.T
        banded_line(axes, ds["step"], middle, low, high, colour, name)
        rows.append(pd.DataFrame({"result": name, "step": ds["step"], "median": middle, "q25": low, "q75": high}))
    training_axis(axes, max(float(ds["step"][-1]) for ds in results.values()))
    axes.set_ylabel(label, fontsize=8)
    axes.legend(fontsize=7)
    return figure, pd.concat(rows, ignore_index=True)


def of_models(results: Results, variables: Mapping[str, str], trained: bool = True) -> "Plotted":
    """Median and quartiles over prompts and positions of each result, at its first step and, if `trained`, at its last."""
    figure, axes = panels(len(variables))
    rows = []
    for panel, (variable, label) in zip(axes, variables.items(), strict=True):
        for which, colour, shift in (("first", BLUE, -0.12), ("last", "black", 0.12)):
            if which == "last" and not trained:
                continue
            for x, (name, ds) in enumerate(results.items()):
                at = ds.isel(step=0 if which == "first" else -1)
                low, middle, high = quartiles(at[variable], ("prompt", "position")).values
                panel.errorbar(
                    x + shift, middle, [[middle - low], [high - middle]], color=colour, marker="o", ms=4, capsize=2
                )
                columns = {"step": int(at["step"]), "median": middle, "q25": low, "q75": high}
                rows.append({"result": name, "variable": variable, **columns})
        panel.set_xlim(-0.6, len(results) - 0.4)
        panel.set_xticks(range(len(results)), list(results), rotation=45, ha="right", fontsize=7)
        panel.set_ylabel(label, fontsize=8)
        panel.set_title("blue: first step" + (", black: last" if trained else ""), fontsize=7)
    return figure, pd.DataFrame(rows)


def principal_planes(results: Results) -> "Plotted":
    """Trajectories of the first prompt's tokens on the principal plane of the last states; the last token in black."""
    shown = [(name, ds, i) for name, ds in results.items() for i in _some(ds.sizes["step"], 2)]
    figure, axes = panels(len(shown))
    rows = []
    for panel, (name, ds, i) in zip(axes, shown, strict=True):
        plane = ds["pca"].isel(step=i, prompt=0).transpose("position", "depth", "component").values
        at = np.flatnonzero(np.isfinite(plane).all((1, 2)))
        if not len(at):
            raise ValueError(f"the first prompt of {name} has too few tokens to span a plane")
        plane = plane[at]
        for position, (path, colour) in enumerate(zip(plane, [*shades(len(plane))[:-1], "black"], strict=True)):
            panel.plot(*path.T, color=colour, lw=0.8, marker=".", ms=2.5, zorder=3 if position == len(plane) - 1 else 2)
        panel.set_title(f"{name}, step {int(ds['step'][i]):,}", fontsize=8)
        index = np.indices(plane.shape[:2]).reshape(2, -1)
        columns = {
            "position": at[index[0]],
            "depth": index[1],
            "first": plane[..., 0].ravel(),
            "second": plane[..., 1].ravel(),
        }
        rows.append(pd.DataFrame({"result": name, "step": int(ds["step"][i]), **columns}))
    figure.supxlabel("first principal axis", fontsize=8)
    figure.supylabel("second", fontsize=8)
    return figure, pd.concat(rows, ignore_index=True)


def noise_response(results: Results) -> "Plotted":
    """Cosine similarity of noisy to clean states at the first and the last layer, after the last step."""
    figure, axes = panels(len(results), sharey=True)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        at = ds["noise_similarity"].isel(step=-1)
        for depth, colour in ((1, BLUE), (int(at["depth"][-1]), ORANGE)):
            by_prompt = at.sel(depth=depth).mean("position").transpose("noise", "prompt").values
            mean, (low, high) = by_prompt.mean(-1), mean_interval(by_prompt, sources(ds))
            banded_line(panel, at["noise"], mean, low, high, colour, f"after block {depth}")
            columns = {"noise": at["noise"].values, "mean": mean, "low": low, "high": high}
            rows.append(pd.DataFrame({"result": name, "depth": depth, **columns}))
        panel.set_xscale("log")
        panel.set_title(name, fontsize=8)
        panel.set_xlabel("noise / embedding", fontsize=8)
    axes[0].set_ylabel("cosine similarity", fontsize=8)
    axes[0].legend(fontsize=7)
    return figure, pd.concat(rows, ignore_index=True)


def singular_values(results: Results, which: str) -> "Plotted":
    """Top singular values by layer, medians over prompts and tokens; beside them 1 / s_1, with its straight line over depth."""
    figure, axes = panels(2 * len(results))
    rows = []
    for values, inverse, (name, ds) in zip(axes[::2], axes[1::2], results.items(), strict=True):
        at = ds["singular_value"].isel(step=0 if which == "first" else -1)
        step, at = int(at["step"]), at.median(("prompt", "token"))
        layers = at["layer"].values
        ranks = [int(rank) for rank in (1, 2, 5, 10, 30, 50) if rank <= at.sizes["rank"]]
        for rank, colour in zip(ranks, shades(len(ranks)), strict=True):
            s = at.sel(rank=rank).values
            values.plot(layers, s, color=colour, marker="o", ms=3, label=f"rank {rank}")
            rows.append(pd.DataFrame({"result": name, "rank": rank, "layer": layers, "value": s}))
        fit = inverse_fit(layers, at.sel(rank=1).values)
        inverse.plot(layers, fit["inverse"], color=BLUE, marker="o", ms=3, ls="", label="1 / s₁")
        said = "no line: fewer than 4 blocks, or no spread"
        if np.isfinite(fit["r2"]):
            inverse.plot(layers, fit["fitted"], color=ORANGE, lw=1.2, label="straight line")
            said = f"R² = {fit['r2']:.2f}, n = {fit['n']} blocks"
        rows[-len(ranks)] = rows[-len(ranks)].assign(**fit)
        values.set_title(f"{name}, step {step:,}", fontsize=8)
        values.set_yscale("log")
        values.tick_params(which="minor", labelsize=7)
        values.set_ylabel("singular value", fontsize=8)
        inverse.set_title(f"{name}: {said}", fontsize=8)
        inverse.set_ylabel("1 / s₁", fontsize=8)
        for panel in (values, inverse):
            panel.set_xlabel("layer", fontsize=8)
            panel.legend(fontsize=6)
    return figure, pd.concat(rows, ignore_index=True)


def coupling_by_layer(results: Results, measure: str, k: int) -> "Plotted":
    """How much each layer couples with all others after the last step, a line for each result."""
    figure, (axes,) = panels(1)
    rows = []
    for (name, ds), colour in zip(results.items(), shades(len(results)), strict=True):
        matrices = -ds[measure].isel(step=-1).sel(k=k).mean("token")
        others = matrices.where(matrices["layer"] != matrices["layer_other"]).mean("layer_other")
        by_prompt = others.transpose("layer", "prompt").values
        mean, (low, high) = np.nanmean(by_prompt, -1), mean_interval(by_prompt, sources(ds))
        banded_line(axes, ds["layer"], mean, low, high, colour, name)
        columns = {"layer": ds["layer"].values, "coupling": mean, "low": low, "high": high}
        rows.append(pd.DataFrame({"result": name, **columns}))
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel(f"−{measure}, K = {k}", fontsize=8)
    axes.legend(fontsize=7)
    return figure, pd.concat(rows, ignore_index=True)


def prompts(results: Results, measure: str, pairs: str, k: int) -> "Plotted":
    """Coupling of each prompt after the last step against its difficulty, where that is known, and its length in tokens."""
    shown = [
        (name, against)
        for name, ds in results.items()
        for against in (("difficulty", "tokens") if "difficulty" in ds.coords else ("tokens",))
    ]
    figure, axes = panels(len(shown))
    tables = {}
    for name, ds in results.items():
        last = ds.isel(step=-1)
        columns = {
            "prompt": last["prompt_text"].values,
            "tokens": last["norm_raw"].isel(depth=0).notnull().sum("position").values,
            "coupling": prompt_couplings(ds, measure, pairs, k)["coupling"].isel(step=-1).values,
        }
        columns |= {"difficulty": last["difficulty"].values} if "difficulty" in ds.coords else {}
        columns |= {"source": last["prompt_source"].values} if "prompt_source" in ds.coords else {}
        tables[name] = pd.DataFrame({"result": name, **columns})
    points = [(tables[name][against].to_numpy(), tables[name]["coupling"].to_numpy()) for name, against in shown]
    lines = [linear_fit(x, y) for x, y in points]
    tried = holm(np.array([line["p"] for line in lines]))
    for panel, (name, against), (x, y), line, corrected in zip(axes, shown, points, lines, tried, strict=True):
        panel.scatter(x, y, s=12, color=BLUE)
        said = fitted_line(panel, x, y, line, corrected if len(shown) > 1 else None)
        of_sources = len(set(tables[name].get("source", [])))
        if of_sources > 1:
            said += f"\np takes prompts of {of_sources} sources as independent"
        panel.set_title(f"{name}\n{said}", fontsize=8)
        panel.set_xlabel(against, fontsize=8)
    axes[0].set_ylabel(f"−{measure}, K = {k}", fontsize=8)
    return figure, pd.concat(tables.values(), ignore_index=True)


def prompt_couplings(ds: xr.Dataset, measure: str, pairs: str, k: int) -> xr.Dataset:
    """Coupling and its null level, (step, prompt), over the layer pairs chosen."""
    at = ds.sel(k=k)
    both = {"coupling": at[measure], "null": null_matrix(at, measure)}
    return xr.Dataset({name: -over_pairs(m.astype(float)).sel(pairs=pairs).mean("token") for name, m in both.items()})


def _some(size: int, count: int) -> list[int]:
    """At most `count` evenly spaced indices, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, size - 1, min(count, size))})
