"""What a reader should know before trusting or comparing results, in sentences.

Conventions of a measurement must be equal in all results that are compared or drawn together: with the final norm in the last
block, measures of one model differ from those without it; so do those of another dtype, of other tokens and of other inputs.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import xarray as xr

from tracker.analysis.pairs import describe_blocks
from tracker.common.text import (
    UNTRAINED,
    by_cause,
    capitalised,
    describe_repeat,
    find_repeats,
    join_names,
)
from tracker.measures.registry import UNDEFINED
from tracker.store import attribute_values, by_step

# Attributes: what is measured alike, on the same inputs, and in runs of one recipe
MEASURED = ("final_norm", "dtype", "precision", "tokens")
CONVENTIONS = (*MEASURED, "inputs_sha256")
OF_RECIPE = (*CONVENTIONS, "model_class", "blocks")


def describe_differences(
    results: Mapping[str, xr.Dataset], compared: Sequence[str] = CONVENTIONS
) -> list[str]:
    """Return a text for each attribute, of those compared, in which results differ, with the value that every result has."""
    lines = []
    for key in compared:
        held = _held(results, key)
        if len(set(held.values())) > 1:
            of_inputs = key == "inputs_sha256"
            shown = 12 if of_inputs else None
            listed = "; ".join(f"{name}: {value[:shown]}" for name, value in held.items())
            # Texts and the tokens that a tokenizer makes of them are measured alike.
            ids = {*_held(results, "token_ids_sha256").values()} if of_inputs else set()
            if len(ids) == 1 and ids != {""}:
                listed += (
                    "; of the same token ids, but in another form, or with other masks or images"
                )
            lines.append(f"{key.removesuffix('_sha256').replace('_', ' ')} ({listed})")
    return lines


def _held(results: Mapping[str, xr.Dataset], key: str) -> dict[str, str]:
    return {name: ", ".join(attribute_values(ds, key)) for name, ds in results.items()}


def doubts(ds: xr.Dataset, skipped: Mapping[int, str]) -> list[str]:
    """List the warnings about one store: skipped steps, suspect and repeated weights, other token ids, equal blocks, fallbacks,
    missing certificates, undefined values.

    Args:
        ds: its units, `reduction.reduced`, along `step`.
        skipped: steps without results, and why.
    """
    steps = ds["step"].values.tolist()
    lines = [f"No results of {line}" for line in by_cause(skipped)]
    lines += [
        f"Step {step:,} is suspect: {why}."
        for step, why in zip(steps, by_step(ds, "suspect"), strict=True)
        if why
    ]
    revisions = by_step(ds, "revision")
    lines += [
        f"Step {step:,} is no published checkpoint but a random initialisation ({revision})."
        for step, revision in zip(steps, revisions, strict=True)
        if revision.startswith(UNTRAINED)
    ]
    prints = dict(zip(steps, by_step(ds, "fingerprint"), strict=True))
    lines += [f"{capitalised(describe_repeat(*same))}." for same in find_repeats(prints).items()]
    lines += other_tokens(dict(zip(steps, by_step(ds, "token_ids_sha256"), strict=True)))
    if "layer_other" in ds.dims:
        lines += describe_blocks(ds)
    if "jacobians_count" in ds:
        lines += _certificates(ds)
    undefined = (
        ds[UNDEFINED].sum("step")
        if UNDEFINED in ds
        else xr.DataArray([], {"quantity": []}, "quantity")
    )
    counts = [
        f"{int(n):,} of {q}"
        for q, n in zip(undefined["quantity"].values, undefined.values, strict=True)
        if n > 0
    ]
    if counts:
        lines.append(f"Undefined values, left out of means and quartiles: {', '.join(counts)}.")
    return lines


def other_tokens(hashes: Mapping[int, str]) -> list[str]:
    """Say, in no line or one, which steps were measured on other token ids than most.

    Args:
        hashes: `token_ids_sha256` by step; "" where it is not known.
    """
    known = {step: digest for step, digest in hashes.items() if digest}
    usual = Counter(known.values()).most_common(1)
    others = [step for step, digest in known.items() if digest != usual[0][0]]
    if not others:
        return []
    which = f"step {others[0]:,}" if len(others) == 1 else f"steps {join_names(others)}"
    return [
        f"The prompts have other token ids at {which} than at the other steps: the tokenizers of the checkpoints differ, and so "
        "results differ for another reason than the weights."
    ]


def _certificates(ds: xr.Dataset) -> Iterator[str]:
    count = int(ds["jacobians_count"].sum())
    missing = ds["jacobians_count"] - ds["sliced_count"]
    if (whole := missing.sum("step")).any():
        reasons = {
            int(layer): why
            for text in attribute_values(ds, "fallbacks")
            for layer, why in json.loads(text).items()
        }
        blocks = [int(layer) for layer in ds["layer"].values[whole.values > 0]]
        causes = "; ".join(dict.fromkeys(reasons[block] for block in blocks))
        yield (
            f"Fallback: {int(whole.sum()):,} of {count:,} Jacobians, of block {join_names(blocks)}, were taken over the full "
            f"sequence and not from single rows, which is as exact and slower ({causes})."
        )
    if (complete := int(ds["complete_count"].sum())) < count:
        yield f"Incomplete: {count - complete:,} of {count:,} sets of top singular vectors did not pass their certificate."
