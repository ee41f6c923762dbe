"""Figures by name: which of them results can make, drawing one, and what to do where results do not suffice.

`tracker.plot(results)` draws in a notebook those of `python -m tracker.figures`, by the same names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from tracker.analysis.across_models import Results, shared
from tracker.analysis.doubts import describe_differences
from tracker.analysis.selections import opened, with_steps
from tracker.common.errors import UsageError, require, warn_caller
from tracker.common.values import INTEGERS, ValueTypeError
from tracker.figures.choices import Axis, Choices, Convention
from tracker.figures.drawing import STYLE
from tracker.figures.registry import ALIASES, FIGURES, NOT_DRAWN, FigureSpec
from tracker.measures.declaration import NORMED
from tracker.measures.registry import BY_NAME, VARIANTS
from tracker.measures.settings import CHOICE_NAMES, USUAL
from tracker.store import Result, runs_of_recipes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CHOSEN = ("measure", "step", "axis", "layers", "recipes")  # the choices that only some figures take
LETTERS_PER_INCH = 13  # of a title


def resolve(name: str | int) -> str:
    """Return the name under which a figure is declared; several figures of the paper may show the same.

    Raises:
        UsageError: for an unknown figure, and for one of the paper that is not drawn; the message states why.
    """
    asked, name = name, str(name)
    if name in NOT_DRAWN:
        raise UsageError(f"figure {name} is not drawn here: {NOT_DRAWN[name]}")
    resolved = ALIASES.get(name, name)
    if resolved not in FIGURES:
        names = [*FIGURES, *ALIASES]
        close = get_close_matches(
            re.sub(r"(?i)^fig(ure)?s?[. ]*", "", name), [*names, *NOT_DRAWN], 1
        )
        meant = f"did you mean {close[0]!r}? Choose" if close else "choose"
        raise UsageError(f"unknown figure {asked!r}; {meant} from {', '.join(names)}")
    return resolved


def draw(
    name: str, results: Results, k: int | None = None, **chosen: Any
) -> "tuple[Figure, pd.DataFrame]":
    """Draw a figure by its resolved name.

    Args:
        k: number of singular vectors; None for the smallest that all results have.
        chosen: further `choices.Choices`.

    Returns:
        The figure, and the numbers that it plots.

    Raises:
        UsageError: if the results do not suffice; the message states what to run.
    """
    from matplotlib import rc_context

    figure, choices = FIGURES[name], Choices(**chosen)
    declaration = _adjusted(figure, choices)
    if reason := lack(declaration, results):
        raise UsageError(f"figure {name} can't be drawn: {reason}")
    ks = shared(results, "k")
    if k is None and not ks and any("k" in ds.coords for ds in results.values()):
        raise UsageError("the results share no k; measure them with a common one")
    for option, value in (("k", k), ("step", choices.step)):
        if value is not None:
            _require_shared(option, value, results)
    for layer in choices.layers or ():
        _require_shared("layer", layer, results)
    if "measure" in figure.takes and (differences := describe_differences(results)):
        warn_caller(f"the results were not measured alike: they differ in {'; '.join(differences)}")
    choices = replace(choices, k=k if k is not None else ks[0] if ks else 0)
    # The user's own settings of matplotlib stay as they are.
    with rc_context(STYLE):
        drawn, tables = declaration.draw(results, choices)
    if choices.ax is None and not drawn.get_suptitle():
        title = fill(declaration.title, int(LETTERS_PER_INCH * drawn.get_figwidth()))
        drawn.suptitle(title)
    return drawn, pd.concat(tables, ignore_index=True)


def _adjusted(figure: FigureSpec, choices: Choices) -> FigureSpec:
    """Return the declaration of a figure with the variables that it needs for these choices.

    Raises:
        UsageError: for what is no measure of pairs of blocks, and for a choice that the figure does not take.
    """
    for option in CHOSEN:
        value = getattr(choices, option)
        if value != getattr(Choices(), option) and option not in figure.takes:
            taking = ", ".join(name for name, other in FIGURES.items() if option in other.takes)
            shown = ",".join(map(str, value)) if option in ("layers", "recipes") else value
            raise UsageError(f"{option} {shown} is for the figures {taking}")
    measure = choices.measure
    if measure is not None and measure not in VARIANTS:
        raise UsageError(
            f"{measure!r} is no measure of pairs of blocks; choose from {', '.join(VARIANTS)}"
        )
    needs = [
        measure if measure and name in VARIANTS else choices.variable(name) for name in figure.needs
    ]
    return replace(figure, needs=tuple(dict.fromkeys(needs)))


def _require_shared(dim: str, value: float, results: Results) -> None:
    measured = shared(results, dim)
    if value not in measured:
        raise UsageError(
            f"{dim} {value} was not measured in all results; they share {', '.join(map(str, measured)) or 'none'}"
        )


def lack(figure: FigureSpec, results: Results) -> str:
    """State why these results do not suffice for a figure and what to run; "" if they suffice."""
    reasons = (_result_lacks(figure, name, ds) for name, ds in results.items())
    if reason := next(filter(None, reasons), ""):
        return reason
    if differences := describe_differences(results, figure.alike):
        return f"the results differ in {'; '.join(differences)}; give results measured by the same conventions"
    if len(results) < figure.results:
        return f"it compares at least {figure.results} results; {len(results)} given"
    return ""


def _result_lacks(figure: FigureSpec, name: str, ds: xr.Dataset) -> str:
    missing = [variable for variable in figure.needs if variable not in ds]
    if "score" in missing:
        return (
            f"{name} has no scores; give results of several models with scores (a Pythia walk records its own, --scores FILE "
            "joins others)"
        )
    if missing == ["tokens_seen"]:
        return (
            f"{name} does not record the training tokens of its steps; walk with a pattern that reads them from the names of "
            "checkpoints, --revisions '...(?P<tokens>...)'"
        )
    if missing and all(variable.endswith(NORMED) for variable in missing):
        return f"{name} lacks {', '.join(missing)}; measure again with final_norm='include' (a walk: --final_norm, another --out)"
    if missing:
        measures = ",".join(_measures(figure))
        return f"{name} lacks {', '.join(missing)}; measure again with measures={measures!r} (a walk: --measures, another --out)"
    first, count = float(ds["step"][0]), ds.sizes["step"]
    if count < figure.steps:
        steps = "one training step" if count == 1 else f"{count} training steps"
        return (
            f"it needs {figure.steps} training steps or more, and {name} has {steps}; measure more, or join measurements in "
            "Python: xarray.concat([a.assign_coords(step=0), b.assign_coords(step=100)], 'step')"
        )
    if figure.untrained and first != 0:
        starts = (
            "does not state its training step"
            if np.isnan(first)
            else f"starts at step {first:,.12g}"
        )
        return (
            f"{name} {starts}, but the figure shows the untrained model; walk with --steps 0,... or --untrained SEED, or mark a "
            "measurement of an untrained model in Python: ds.assign_coords(step=0)"
        )
    return ""


def _measures(figure: FigureSpec) -> list[str]:
    """Return the names of `measures=` that give what the figure needs, with the default ones."""
    enabled = {*USUAL, *(BY_NAME[name].option for name in figure.needs if name in BY_NAME)}
    return [name for name in CHOICE_NAMES if name in enabled]


def availability(results: Mapping[str, xr.Dataset]) -> list[str]:
    """List every figure with its title and what it needs, or why the results do not suffice; then those that are not drawn."""
    lines = []
    for name, figure in FIGURES.items():
        status = (
            (lack(figure, results) or "can be drawn")
            if results
            else f"needs {', '.join(figure.needs) or 'results'}"
        )
        lines.append(f"{', '.join((name, *figure.also)):11} {figure.title}; {status}")
    return [*lines, *(f"{name:11} not drawn here: {why}" for name, why in NOT_DRAWN.items())]


def plot(
    results: Result | Sequence[Result] | Mapping[str, Result | Sequence[Result]],
    name: str | int | None = None,
    *,
    measure: str | None = None,
    k: int | None = None,
    step: float | None = None,
    layers: int | Sequence[int] | None = None,
    axis: Axis = "auto",
    convention: Convention = "package",
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw one figure of a measurement, a walk or a training run, or of several of them.

    Under `%matplotlib inline`, a notebook shows the figure that the last line of a cell returns; `.savefig("figure.pdf")` saves
    it.

    Args:
        results: a Dataset of `tracker.measure` or `tracker.open_results`, or a part of one; a store or its directory; or several
            of them, as a list or as a mapping from names, which the figure shows. In a mapping, a list or a mapping holds the
            runs of a recipe, of which "curves" draws a line each, in one colour. A Dataset without training steps allows the
            figures that need one step. Of several results that were measured by different conventions, "curves", "heatmap" and
            "1b" are drawn with a warning.
        name: "curves", "heatmap", or a figure of the paper such as "1b" (`python -m tracker.figures list` lists them). None
            draws "curves" if there are several training steps, else "heatmap".
        measure: the measure of pairs of blocks that "curves", "heatmap" and "1b" show, such as "offdiag" or
            "miscoupling_normed"; None for that of the figure, of the blocks alone.
        k: the number of singular vectors; None for the smallest measured.
        step: the training step of a "heatmap", or the one that "curves" and "1b" mark; None for the last.
        layers: the blocks that "3", "28" and "29" show, or the block of "4", "18" and "19"; None for those of the figure.
        axis: the scale of training steps: "linear", "log", or "auto" for a linear one if they are evenly spaced.
        convention: "paper" for the paper's: minus mis-coupling, mean over all pairs of blocks, and variables that count the
            final norm, where there are such; results without them are refused (docs/figures.md).
        ax: the axes to draw into, for a figure of one panel; the figure returned is theirs.

    Raises:
        UsageError: for an unknown figure, for one for which the results do not suffice (the message states what they
            lack), for a measure, K, step or block that was not measured, and for results that were measured by
            different conventions, in other figures.
        ImportError: without the extra `report`.
    """
    require("matplotlib", "tracker.plot")
    recipes, several = {}, {}
    for recipe, runs in runs_of_recipes(results).items():
        labelled = {
            recipe if len(runs) == 1 else f"{recipe}, {run}": with_steps(opened(of), float("nan"))
            for run, of in runs.items()
        }
        if labelled.keys() & several.keys():
            raise UsageError(
                f"several results are called {', '.join(labelled)}; give each another name"
            )
        recipes[recipe] = list(labelled)
        several |= labelled
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes | None):
        raise UsageError(
            f"ax is a {type(ax).__name__}; give matplotlib axes, as from plt.subplots()"
        )
    try:
        layers = None if layers is None else INTEGERS(layers)
    except ValueTypeError as error:
        raise UsageError(f"layers={error}") from None
    if name is None:
        of_steps = len(recipes) < len(several) or all(
            ds.sizes["step"] > 1 for ds in several.values()
        )
        name = "curves" if of_steps else "heatmap"
    chosen = {
        "measure": measure,
        "step": step,
        "layers": layers,
        "axis": axis,
        "convention": convention,
        "ax": ax,
        "recipes": recipes if len(recipes) < len(several) else None,
    }
    figure, _ = draw(resolve(name), several, k, **chosen)
    return figure
