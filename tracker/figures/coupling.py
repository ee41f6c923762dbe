"""Figures of coupling between blocks: the matrix of a step, which loggers also draw, curves over training, between layers,
by layer, and by prompt.

Coupling is the null level minus the mis-coupling; by the paper's convention it is minus the mis-coupling, and is called so
(`choices.Choices`). Intervals are 95 % t intervals of means over prompts, clustered by their sources where results
record them (`regression.clustered_mean`).
"""

from collections.abc import Mapping
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results
from tracker.analysis.curves import SAMPLES, curves, labelled_over_pairs, sources, suspect
from tracker.analysis.null_levels import null_level
from tracker.analysis.onset import Onset, onset, pairs_of_blocks
from tracker.analysis.pairs import independent_pairs, where_counted
from tracker.analysis.regression import holm, linear_fit
from tracker.analysis.variables import evenly_spaced
from tracker.figures.choices import Choices
from tracker.figures.drawing import (
    BLUE,
    GREEN,
    GREY,
    LETTERS_OF_LABEL,
    LETTERS_OF_LEGEND,
    ORANGE,
    PAIR_WORDS,
    SERIES,
    at_step,
    banded_line,
    colour_map,
    definition,
    fitted_line,
    label_y,
    legend_below,
    logarithmic_y,
    mark_step,
    mean_line,
    panels,
    shades,
    training_axis,
)
from tracker.measures.declaration import WITH_NORM
from tracker.measures.registry import BY_NAME

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tracker.figures.drawing import Plotted

# Of the measures drawn of a single result
COLOURS = {"miscoupling": BLUE, "offdiag_normalized": ORANGE}
TRAJECTORY = {
    "lss": "Line-shape score\n(1: straight)",
    "expodistance": "Expodistance\n(0: exponential growth)",
}
PER_ROW = 3  # matrices
SIZE = 4.8, 4.0  # inches, of one matrix
# Of the matrix and its bar in a picture, which leaves room for longer numbers
PLACE = 0.1, 0.12, 0.86, 0.77
MEASURE = "offdiag_normalized"  # the paper's "normalized"
HALF = 0.5  # of the largest coupling
AGAINST = {"difficulty": "Difficulty of the prompt", "tokens": "Tokens of the prompt"}


def heatmaps(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw the matrix of pairs of blocks of each result, in the same colours: mis-coupling m_K, unless another is chosen."""
    k, measure = choices.k, choices.measure or choices.variable("miscoupling")
    shown, tables = {}, []
    for name, ds in results.items():
        i = -1 if choices.step is None else list(ds["step"].values).index(choices.step)
        at = ds.isel(step=i).sel(k=k)
        matrix, level = (values.mean(SAMPLES) for values in (at[measure], null_level(at, measure)))
        null = float(where_counted(level, ds).mean())
        shown[f"{at_step(name, ds, i)}\n{_title(matrix, k)}"] = matrix, null
        tables.append(matrix.to_dataframe().reset_index().assign(result=name))
    return _heatmaps(shown, target), pd.concat(tables, ignore_index=True)


def coupling_pictures(matrices: xr.DataArray, nulls: Mapping[int, float]) -> dict[int, np.ndarray]:
    """Render the (L, L) matrix of each K as an RGBA image, (height, width, 4).

    Rows are blocks l, columns the blocks l' in whose basis they are expressed. A diagonal that is 0 by definition is grey; the
    colours span the other entries and their null level. What is the same in all pictures is drawn once.

    Args:
        matrices: mis-couplings (k, layer, layer_other), means over prompts and tokens, by the name of their measure.
        nulls: the mean of their null levels over l != l', by K.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    canvas = FigureCanvasAgg(Figure(figsize=SIZE))
    heatmap = _Heatmap(canvas.figure.add_axes(PLACE), matrices.sizes["layer"])
    for part in heatmap.changing:
        part.set_animated(True)  # is not drawn with the rest
    canvas.draw()
    unchanging = canvas.copy_from_bbox(canvas.figure.bbox)
    pictures = {}
    for k, null in nulls.items():
        matrix = _where_defined(matrices.sel(k=k))
        heatmap.show(_title(matrices, k), matrix, null, _range(matrix, null))
        canvas.restore_region(unchanging)
        for part in heatmap.changing:
            canvas.figure.draw_artist(part)
        pictures[k] = np.array(canvas.buffer_rgba())
    return pictures


def _title(matrix: xr.DataArray, k: int) -> str:
    return f"{BY_NAME[str(matrix.name)].label}, K = {k}"


def _heatmaps(shown: Mapping[str, tuple[xr.DataArray, float]], target: "Axes | None") -> "Figure":
    """Draw matrices of one measure, with their null levels, by title."""
    figure, places = panels(len(shown), target, min(len(shown), PER_ROW), SIZE)
    matrices = [(_where_defined(matrix), null) for matrix, null in shown.values()]
    ranges = [_range(matrix, null) for matrix, null in matrices]
    shared = min(low for low, _ in ranges), max(high for _, high in ranges)
    for axes, title, (matrix, null) in zip(places, shown, matrices, strict=True):
        _Heatmap(axes, len(matrix)).show(title, matrix, null, shared)
    return figure


class _Heatmap:
    """A panel with the matrix of L blocks and its bar of colours.

    Attributes:
        changing: what `show` changes, in the order in which it is drawn.
    """

    def __init__(self, axes: "Axes", L: int) -> None:
        from matplotlib.ticker import MaxNLocator

        self.axes = axes
        colours = colour_map().reversed().with_extremes(bad="lightgrey")
        self.image = axes.imshow(
            np.zeros((L, L)), cmap=colours, extent=(0.5, L + 0.5, L + 0.5, 0.5)
        )
        axes.grid(False)
        axes.set(xlabel="Block l' (basis)", ylabel="Block l (Jacobian)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        self.bar = axes.figure.colorbar(self.image, ax=axes)
        self.bar.set_label("Mis-coupling (0: coupled)", fontsize=8)
        self.bar.ax.tick_params(labelsize=8)
        self.level = self.bar.ax.axhline(color="black", lw=1)

    @property
    def changing(self) -> "list[Artist]":
        frame = self.axes.spines.values()  # half of its width lies on the image
        legend = self.axes.get_legend()
        return [self.image, *frame, self.axes.title, *([legend] if legend else []), self.bar.ax]

    def show(self, title: str, matrix: np.ndarray, null: float, range: tuple[float, float]) -> None:
        """Show a matrix, in which an entry that is 0 by definition is NaN, with its null level and the range of colours."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        self.image.set_data(matrix)
        self.image.set_clim(*range)
        self.level.set_ydata([null, null])
        self.axes.set_title(title, fontsize=8, pad=20)
        explained: list[Any] = [Line2D([], [], color="black", lw=1, label=f"null level {null:.2f}")]
        if np.isnan(matrix).any():
            explained.insert(0, Patch(color="lightgrey", label="l = l': 0 by definition"))
        # Above the axes, and the title above it: below them is the label of x, at a distance that depends on the layout.
        self.axes.legend(
            handles=explained,
            ncols=2,
            loc="lower center",
            bbox_to_anchor=(0.5, 1),
            borderaxespad=0,
            frameon=False,
            fontsize=8,
        )


def _where_defined(matrix: xr.DataArray) -> np.ndarray:
    """Return the entries, NaN in place of those that are 0 by definition: none, if the sides of the basis are swapped."""
    values = matrix.values.astype(np.float64)
    if BY_NAME[str(matrix.name)].variant != "vju":
        values[matrix["layer"].values[:, None] == matrix["layer_other"].values] = np.nan
    return values


def _range(matrix: np.ndarray, null: float) -> tuple[float, float]:
    """Return the range of the entries and their null level."""
    values = [*matrix[~np.isnan(matrix)], *([] if np.isnan(null) else [null])]
    return min(values, default=0.0), max(values, default=1.0)


def training_curves(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw mis-coupling with its null level, LSS and expodistance over training, with quartile bands.

    Several results are drawn over each other, each in its colour. Unless a measure is chosen, mis-coupling m_K is shown and, of a
    single result, that of the paper's equation 14 too.
    """
    figure, (coupling, *others) = panels(1 + len(TRAJECTORY), target, size=(3.3, 3.2))
    single = len(results) == 1
    usual = {choices.variable(of): colour for of, colour in COLOURS.items()}
    measures = [choices.measure] if choices.measure else list(usual)[: len(usual) if single else 1]
    paths = {choices.variable(of): heading for of, heading in TRAJECTORY.items()}
    at = {"k": choices.k, "pairs": choices.pairs}
    tables = []
    for i, (name, ds) in enumerate(results.items()):
        points, colour = curves(ds, [*measures, *paths]), SERIES["light"][i % len(SERIES["light"])]
        steps, marked = points["step"].values, suspect(points) != ""
        drawn, columns = [], {"result": name, "step": steps}
        for of in measures:
            of_measure = usual.get(of, BLUE) if single else colour
            middle, low, high, null = (
                points[of + end].sel(at).values for end in ("", "_q25", "_q75", "_null")
            )
            banded_line(
                coupling,
                steps,
                middle,
                low,
                high,
                of_measure,
                BY_NAME[of].label if single else name,
            )
            level = "its null level" if single else None if i else "null level"
            coupling.plot(steps, null, color=of_measure, ls=":", label=level)
            drawn.append((coupling, middle))
            columns |= {of: middle, f"{of}_q25": low, f"{of}_q75": high, f"{of}_null": null}
        for axes, variable in zip(others, paths, strict=True):
            low, middle, high = (
                points[variable].sel(statistic=s).values for s in ("q25", "median", "q75")
            )
            banded_line(axes, steps, middle, low, high, GREEN if single else colour)
            drawn.append((axes, middle))
            columns |= {variable: middle, f"{variable}_q25": low, f"{variable}_q75": high}
        for axes, values in drawn if marked.any() else ():
            axes.plot(
                steps[marked], values[marked], "x", color=ORANGE, ms=9, label="suspect checkpoint"
            )
        tables.append(pd.DataFrame(columns))
    title = f"Pairs of blocks, {PAIR_WORDS[choices.pairs]}, K = {choices.k}"
    title += "" if single else f"\n{BY_NAME[measures[0]].label}"
    coupling.set(title=title, ylabel="Mis-coupling", ylim=(0, None))
    for axes, (variable, heading) in zip(others, paths.items(), strict=True):
        axes.set(ylabel=heading, title=WITH_NORM if BY_NAME[variable].variant == "normed" else "")
    lss, expodistance = others
    logarithmic_y(expodistance)
    for axes in (coupling, *others):
        training_axis(axes, *(ds["step"].values for ds in results.values()), scale=choices.axis)
        mark_step(axes, choices.step)
    legend_below(coupling)
    if any(line.get_label() == "suspect checkpoint" for line in lss.lines):
        legend_below(lss)
    (only, *_) = results.values()
    figure.suptitle(only.attrs.get("suite", "") if single else "")
    return figure, pd.concat(tables, ignore_index=True)


def over_training(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw the mean coupling over prompts with its interval, that of unrelated blocks, and the onset (Fig. 1b)."""
    figure, axes = panels(len(results), target, sharey=True)
    rows = []
    for panel, (name, ds) in zip(axes, results.items(), strict=True):
        steps, source = ds["step"].values, sources(ds)
        coupling, null = (
            values.transpose("step", "prompt") for values in _coupling_and_null(ds, choices)
        )
        began = _onset(ds, choices)
        null = null.mean("prompt").values
        mean = mean_line(panel, coupling, source, BLUE)
        panel.plot(steps, null, color=GREY, ls=":", label="unrelated blocks")
        _mark_onset(panel, began)
        training_axis(panel, steps, scale=choices.axis, also=[began.low])
        mark_step(panel, choices.step)
        panel.set_title(name)
        legend_below(panel)
        columns = {
            "step": steps,
            coupling_word(choices): mean["mean"],
            "low": mean["low"],
            "high": mean["high"],
        }
        columns |= {"unrelated": null, "onset_after": began.earlier, "onset_by": began.later}
        columns |= {"onset_low": began.low, "onset_high": began.high}
        rows.append(pd.DataFrame({"result": name, **columns}))
    label_y(axes, _label(choices))
    return figure, pd.concat(rows, ignore_index=True)


def _onset(ds: xr.Dataset, choices: Choices) -> Onset:
    """Return the onset of the coupling that is shown, over pairs of different blocks."""
    departure = coupling_of_prompts(ds, _as_package(choices)).transpose("step", "prompt").values
    pairs = independent_pairs(_below_null(ds, choices), ds)
    return onset(ds["step"].values, departure, pairs, sources(ds))


def _mark_onset(panel: "Axes", began: Onset) -> None:
    """Shade the steps between which the onset lies, lighter over its whole interval, and state them in the legend."""
    label = fill(f"onset: {began.words}", LETTERS_OF_LEGEND)
    if not began.found:
        panel.plot([], [], " ", label=label)
        return
    panel.axvspan(began.low, began.high, color=ORANGE, alpha=0.12, lw=0)
    # The edges show a bracket of no width: an onset at step 0.
    panel.axvspan(
        began.earlier, began.later, facecolor=(ORANGE, 0.15), edgecolor=ORANGE, lw=0.8, label=label
    )


def layer_graph(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw blocks as nodes on a circle; width and opacity of an edge show their coupling, the mean of both directions."""
    shown = [(name, ds, i) for name, ds in results.items() for i in _around_onset(ds, choices)]
    figure, axes = panels(len(shown), target)
    rows = []
    for name, ds, i in shown:
        gain = _below_null(ds.isel(step=i), choices)
        gain = gain if choices.paper else where_counted(gain, ds)
        first, second = np.triu_indices(len(gain), 1)
        edges = {
            "layer": first + 1,
            "layer_other": second + 1,
            "coupling": pairs_of_blocks(gain.values),
        }
        rows.append(pd.DataFrame({"result": name, "step": ds["step"].values[i], **edges}))
    table = pd.concat(rows, ignore_index=True)
    # One scale for all panels; where no pair is coupled, no edge is drawn.
    top = max(table["coupling"].max(), np.finfo(float).tiny)
    for panel, part, (name, ds, i) in zip(axes, rows, shown, strict=True):
        angle = np.pi / 2 - 2 * np.pi * np.arange(ds.sizes["layer"]) / ds.sizes["layer"]
        x, y = np.cos(angle), np.sin(angle)
        for a, b, value in part[["layer", "layer_other", "coupling"]].itertuples(index=False):
            weight = max(0.0, value / top)
            panel.plot(
                x[[a - 1, b - 1]],
                y[[a - 1, b - 1]],
                color=BLUE,
                lw=0.3 + 2.5 * weight,
                alpha=weight,
                zorder=1,
            )
        panel.scatter(x, y, s=90, color="white", edgecolor=GREY, zorder=2)
        for layer in range(len(x)):
            panel.text(
                x[layer], y[layer], str(layer + 1), ha="center", va="center", fontsize=6, zorder=3
            )
        panel.set(aspect="equal", title=at_step(name, ds, i))
        panel.axis("off")
    label = f"{coupling_name(_as_package(choices))}: {top:.2f}; thinner: less"
    axes[0].plot([], [], color=BLUE, lw=2.8, label=label)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, 0.02), frameon=False)
    return figure, table


def _around_onset(ds: xr.Dataset, choices: Choices) -> list[int]:
    """Return the indices of the last step before the onset, the first at half of the largest coupling, and the last step.

    Without an onset: at most three evenly spaced steps.
    """
    began, count = _onset(ds, choices), ds.sizes["step"]
    if not began.found:
        return evenly_spaced(count, 3)
    coupling = coupling_of_prompts(ds, _as_package(choices)).mean("prompt").values
    # The first measured step where the onset is at or before it
    before = max(int((ds["step"].values < began.later).sum()) - 1, 0)
    half = int((coupling >= HALF * np.nanmax(coupling)).argmax())
    return sorted({before, half, count - 1})


def by_layer(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw the mean coupling of each layer with all others after the last step, one line per result."""
    figure, (axes,) = panels(1, target)
    rows = []
    for (name, ds), colour in zip(results.items(), shades(len(results)), strict=True):
        last = ds.isel(step=-1)
        matrices = _of_pairs(last, choices)[0].mean("token")
        # The paper counts the pairs of one module.
        apart = matrices["layer"] != matrices["layer_other"]
        others = (matrices.where(apart) if choices.paper else where_counted(matrices, ds)).mean(
            "layer_other"
        )
        columns = mean_line(axes, others, sources(ds), colour, name)
        columns = {
            "layer": columns["layer"],
            coupling_word(choices): columns.pop("mean"),
            **columns,
        }
        rows.append(pd.DataFrame({"result": name, **columns}))
    axes.set(xlabel="Block l", ylabel=_label(choices))
    legend_below(axes)
    return figure, pd.concat(rows, ignore_index=True)


def by_prompt(results: Results, choices: Choices, target: "Axes | None") -> "Plotted":
    """Draw the coupling of each prompt after the last step against its length and, where it is known, its difficulty."""
    word = coupling_word(choices)
    tables = {
        name: pd.DataFrame({"result": name, **_prompt_columns(ds, choices)})
        for name, ds in results.items()
    }
    shown = [
        (name, x) for name, table in tables.items() for x in ("difficulty", "tokens") if x in table
    ]
    figure, axes = panels(len(shown), target)
    points = [(tables[name][x].to_numpy(), tables[name][word].to_numpy()) for name, x in shown]
    fits = [linear_fit(x, y) for x, y in points]
    corrected = holm(np.array([fit["p"] for fit in fits]))
    for panel, (name, against), (x, y), fit, p in zip(
        axes, shown, points, fits, corrected, strict=True
    ):
        panel.scatter(x, y, s=12, color=BLUE)
        text = fitted_line(panel, x, y, fit, p if len(shown) > 1 else None)
        count = len(set(tables[name]["source"])) if "source" in tables[name] else 0
        if count > 1:
            text += f"\np treats prompts of {count} sources as independent"
        panel.set(title=f"{name}\n{text}", xlabel=AGAINST[against])
    label_y(axes, _label(choices))
    if target is None and not any(x == "difficulty" for _, x in shown):
        figure.suptitle("Coupling of each prompt against its length")
    return figure, pd.concat(tables.values(), ignore_index=True)


def _prompt_columns(ds: xr.Dataset, choices: Choices) -> dict[str, np.ndarray]:
    last = ds.isel(step=-1)
    columns = {
        "prompt": last["prompt_text"].values,
        "tokens": last["norm"].isel(depth=0).notnull().sum("position").values,
        coupling_word(choices): coupling_of_prompts(last, choices).values,
    }
    columns |= {"difficulty": last["difficulty"].values} if "difficulty" in ds.coords else {}
    columns |= {"source": last["prompt_source"].values} if "prompt_source" in ds.coords else {}
    return columns


def coupling_of_prompts(ds: xr.Dataset, choices: Choices) -> xr.DataArray:
    """Return the coupling of each prompt, the mean over pairs of blocks and tokens."""
    return _coupling_and_null(ds, choices)[0]


def coupling_word(choices: Choices) -> str:
    """Return what the convention's coupling is called: the word stands for the null level minus the mis-coupling alone."""
    return "minus mis-coupling" if choices.paper else "coupling"


def coupling_name(choices: Choices) -> str:
    """Return the coupling shown, with its definition and K."""
    return f"{coupling_word(choices)} by {definition(_measure(choices))}, K = {choices.k}"


def _coupling_and_null(ds: xr.Dataset, choices: Choices) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the coupling of each prompt, and that of unrelated blocks."""
    of_pairs = (
        labelled_over_pairs(values, ds).sel(pairs=choices.pairs)
        for values in _of_pairs(ds, choices)
    )
    coupling, null = (values.mean("token") for values in of_pairs)
    return coupling, null


def _of_pairs(ds: xr.Dataset, choices: Choices) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the coupling of each pair of blocks, and that of unrelated blocks."""
    at, measure = ds.sel(k=choices.k), _measure(choices)
    values, level = at[measure].astype(float), null_level(at, measure)
    return (-values, -level) if choices.paper else (level - values, xr.zeros_like(level))


def _below_null(ds: xr.Dataset, choices: Choices) -> xr.DataArray:
    """Return the null level minus the mis-coupling of each pair of blocks, by either convention, mean over prompts and tokens."""
    of_pairs, _ = _of_pairs(ds, _as_package(choices))
    return of_pairs.mean(SAMPLES).transpose(..., "layer", "layer_other")


def _as_package(choices: Choices) -> Choices:
    """Return choices of the same measure by the package's convention."""
    return replace(choices, convention="package", measure=_measure(choices))


def _measure(choices: Choices) -> str:
    return choices.measure or choices.variable(MEASURE)


def _label(choices: Choices) -> str:
    """Return the label of an axis of couplings."""
    label = BY_NAME[_measure(choices)].label
    text = (
        f"Minus {label}, {PAIR_WORDS[choices.pairs]}"
        if choices.paper
        else f"Coupling: null level − {label}"
    )
    return fill(f"{text}, K\u00a0=\u00a0{choices.k}", LETTERS_OF_LABEL, break_on_hyphens=False)
