"""Train small models, each with one change from a base, and measure when their blocks couple: python -m examples.when

The plan, written before the first training, and what came out are in docs/studies/when.md. Nothing is downloaded. Finished
trainings are kept: the same command continues.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import ttest_ind

from checkpoints import nano
from checkpoints.fetch import cached_snapshot
from tracker import curves, open_results
from tracker.analysis.regression import holm, mean_interval
from tracker.figures.drawing import banded_line, panels, shades, training_axis
from tracker.pythia import run
from tracker.walk.command import Walk

SEEDS = (0, 1, 2)
STEPS = (0, 8, 32, 128, 512)
# Pythia-70m's rate and decay
BASE = nano.NanoRecipe(layers=8, rate=1e-3, embedding_rate=1.0, weight_decay=0.1, steps=STEPS)
RECIPES = {
    "base": BASE,
    "4 blocks": replace(BASE, layers=4),
    "16 blocks": replace(BASE, layers=16),
    "width 64": replace(BASE, width=64),
    "width 256": replace(BASE, width=256),
    "128 steps": replace(BASE, steps=STEPS[:-1]),
    "2048 steps": replace(BASE, steps=(*STEPS, 2048)),
    "decay 0": replace(BASE, weight_decay=0.0),
    "decay 3": replace(BASE, weight_decay=3.0),
    "rate 3e-4": replace(BASE, rate=3e-4),
    "rate 3e-3": replace(BASE, rate=3e-3),
    "embeddings x 20": replace(BASE, embedding_rate=20.0),
}


@dataclass(frozen=True)
class Shuffled(nano.NanoRecipe):
    """A recipe whose text has its tokens in random order: their frequencies can be learned, and nothing else."""

    shuffled: bool = True

    def arranged(self, ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the tokens of the text, (tokens,), in random order."""
        return ids[torch.randperm(len(ids), generator=generator)]


CONTROL = "shuffled text"  # planned after the tests, and described only
RECIPES[CONTROL] = Shuffled(**asdict(BASE))
# What is varied, and the recipes that show it
VARIED = {
    "Blocks": ("4 blocks", "base", "16 blocks"),
    "Width": ("width 64", "base", "width 256"),
    "Training length": ("128 steps", "base", "2048 steps"),
    "Learning rate": ("rate 3e-4", "base", "rate 3e-3"),
    "Decay, embeddings": ("decay 0", "base", "decay 3", "embeddings x 20"),
    "Order of tokens": ("base", CONTROL),
    "ViTs on CIFAR10": ("ViT, 4 blocks", "ViT, 12 blocks"),
}
COUPLINGS = ("coupling", "by eq. 14")
DRAWN = (*COUPLINGS, "line-shape score", "expodistance")
# What a table shows: the variable of `tracker.curves`, and where
SHOWN = {
    "coupling": ("miscoupling_coupling", {"pairs": "mean_offdiag"}),
    "coupling of neighbours": ("miscoupling_coupling", {"pairs": "mean_adjacent"}),
    "by eq. 14": ("offdiag_normalized_coupling", {"pairs": "mean_offdiag"}),
    "of neighbours by eq. 14": ("offdiag_normalized_coupling", {"pairs": "mean_adjacent"}),
    "line-shape score": ("lss", {"statistic": "median"}),
    "expodistance": ("expodistance", {"statistic": "median"}),
}


def measure_text(name: str, seed: int, out: Path) -> None:
    """Train a recipe and measure its checkpoints into a store below `out`; what is there is not done again."""
    # The weights depend on the number of threads.
    torch.set_num_threads(1)
    recipe = RECIPES[name]
    cache = nano.train(seed, recipe)
    checkpoints = out / name / f"seed{seed}" / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    for step in recipe.steps:
        link = checkpoints / f"step{step}"
        if not link.is_symlink():
            link.symlink_to(cached_snapshot(nano.REPO, f"step{step}", cache))
    walk = Walk(model=str(checkpoints), out=store(name, seed, out), wandb="off", options={"k": 10})
    if status := run(walk):
        raise SystemExit(status)


def store(name: str, seed: int, out: Path) -> Path:
    """Return the directory of a run's results."""
    return out / name / f"seed{seed}" / "results"


def values(out: Path) -> pd.DataFrame:
    """Return the numbers of all steps of all runs below `out`: means over prompts and pairs of blocks, medians over tokens."""
    stores = {
        (name, seed): open_results(store(name, seed, out)) for name in RECIPES for seed in SEEDS
    }
    for cell in sorted(out.glob("ViT*/*/coupling")):
        seed = int(cell.parent.name.partition("seed")[2])
        # The last patch, as in docs/vit.md
        stores[cell.parents[1].name, seed] = open_results(cell).isel(token=[-1])
    rows = []
    for (name, seed), results in stores.items():
        reduced = curves(results).isel(k=0)
        for step in results.step.values.tolist():
            at = reduced.sel(step=step)
            loss = float(at.score.squeeze()) if "score" in at else float("nan")
            numbers = {shown: float(at[of].sel(place)) for shown, (of, place) in SHOWN.items()}
            rows.append({"recipe": name, "seed": seed, "step": step, "loss": loss, **numbers})
    return pd.DataFrame(rows)


def table(numbers: pd.DataFrame) -> str:
    """Return what a recipe gives as a Markdown table: means over runs with t intervals of 95 %.

    Coupling is its change from the first step to the last, with p of Welch's test of the last step against that of the base,
    corrected (Holm) for all recipes but the control and both definitions; and its highest mean and the step of that.
    """
    runs: Any = numbers.groupby(["recipe", "seed"], sort=False)
    last, change = runs.last(), runs.last() - runs.first()
    tested = [(name, of) for of in COUPLINGS for name in RECIPES if name not in ("base", CONTROL)]
    p = [ttest_ind(last[of][name], last[of]["base"], equal_var=False)[1] for name, of in tested]
    corrected = dict(zip(tested, holm(np.array(p)), strict=True))
    columns = ["loss", *DRAWN]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in last.index.unique("recipe"):
        cells = []
        for of in columns:
            shown = change if of in COUPLINGS else last
            of_runs = np.array(shown[of][name])
            low, high = mean_interval(of_runs)
            cell = f"{of_runs.mean():z.3f} [{low:z.3f}, {high:z.3f}]"
            if (name, of) in corrected:
                cell += f", p = {corrected[name, of]:.2g}"
            if of in COUPLINGS:
                by_step: Any = numbers[numbers.recipe == name].groupby("step")[of].mean()
                cell += f"; highest {by_step.max():.3f} at step {by_step.idxmax()}"
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(numbers: pd.DataFrame, file: Path) -> None:
    """Draw what is varied as columns of panels and what is measured as rows: means over seeds, bands from least to largest."""
    runs = numbers.groupby(["recipe", "step"])[list(DRAWN)].agg(["mean", "min", "max"])
    columns = {
        title: drawn
        for title, names in VARIED.items()
        if (drawn := [name for name in names if name in runs.index])
    }
    figure, axes = panels(
        len(DRAWN) * len(columns), per_row=len(columns), size=(2.1, 1.7), sharey="row"
    )
    for panel, (measured, (title, names)) in zip(
        axes, product(DRAWN, columns.items()), strict=True
    ):
        for name, colour in zip(names, shades(len(names)), strict=True):
            of_recipe = runs.loc[name][measured].reset_index()
            banded_line(panel, of_recipe.to_dict("series"), colour, name)
        training_axis(panel, *(runs.loc[name].index for name in names), scale="log")
        if measured == "expodistance":
            panel.set_yscale("log")
        if measured == DRAWN[0]:
            panel.set_title(title)
        if measured == DRAWN[-1]:
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
        else:
            panel.set_xlabel("")
    for measured, panel in zip(DRAWN, axes[:: len(columns)], strict=True):
        panel.set_ylabel(measured)
    figure.savefig(file, dpi=120)


def main(out: Path, jobs: int) -> None:
    """Train and measure all recipes, and report on every run below `out`."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        done = [pool.submit(measure_text, name, seed, out) for seed in SEEDS for name in RECIPES]
        for run_done in done:
            run_done.result()
    numbers = values(out)
    numbers.to_csv(out / "values.csv", index=False, float_format="%.4f")
    draw(numbers, out / "when.png")
    print(table(numbers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/when"), help="the stores")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    given = parser.parse_args()
    main(given.out, given.jobs)
