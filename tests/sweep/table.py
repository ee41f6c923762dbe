"""The table of a sweep, in Markdown."""

import collections
from collections.abc import Sequence
from pathlib import Path

from tests.sweep.judge import Outcome

PATH = str(Path(__file__).parent.parent.parent / "docs" / "sweep.md")
FAULTS = ("wrong", "raw exception", "changed", "differs after use")
ORDER = ("right", "refused", *FAULTS, "no oracle", "too slow", "not built")


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many classes had each outcome."""
    found = collections.Counter(outcome.outcome for outcome in outcomes)
    return {name: found[name] for name in ORDER if found[name]}


def write(path: str, outcomes: Sequence[Outcome], command: str) -> None:
    """Write the counts by group, and a row for every class."""
    import timm
    import torch
    import transformers

    groups = list(dict.fromkeys(outcome.group for outcome in outcomes))
    lines = [
        "# Sweep",
        "",
        f"Written by `{command}` with torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, timm "
        f"{timm.__version__}. Every class that builds from a tiny random configuration is measured in float64 (float32 "
        "where the note says so) and compared with gradients between the hidden states of one forward pass of the model.",
        "",
        "- **right**: the blocks are all the blocks that lead to the output, in order; singular values, "
        "mis-couplings (all but `miscoupling_release_trace`) "
        "and the trajectory measures agree with the comparison. *Error* is the largest: of singular values "
        "relative to the largest one, of mis-couplings relative to their conditioning (Wedin's bound).",
        "- **refused**: a `UsageError`; the table shows its first line.",
        "- **wrong**: other numbers, blocks or tokens. **raw exception**: another exception, although the model itself runs. "
        "**changed**: measuring changed the model.",
        "- **differs after use**: measured again, after the model was used, it gives another Dataset (bit for bit) or another "
        "refusal. *Used* says what ran before: a forward pass in inference mode with hidden states and attentions as further "
        "outputs, as far as the class takes that; one with a backward pass; `generate`. Where use changes the model's own "
        "output, a note says so, and nothing is compared.",
        "- **no oracle**: measured, but the comparison cannot be made. **not built**: there is no tiny configuration, or the "
        "model does not run by itself.",
        "",
        "| group | " + " | ".join(ORDER) + " | all |",
        "|" + "---|" * (len(ORDER) + 2),
    ]
    for group in [*groups, "all"]:
        of = [outcome for outcome in outcomes if group in (outcome.group, "all")]
        found = counts(of)
        lines.append(f"| {group} | " + " | ".join(str(found.get(name, 0)) for name in ORDER) + f" | {len(of)} |")
    for group in groups:
        lines += [
            "",
            f"## {group}",
            "",
            "| class | outcome | error | used | reason or blocks | note |",
            "|---|---|---|---|---|---|",
        ]
        for outcome in (o for o in outcomes if o.group == group):
            error = f"{outcome.error:.0e}" if outcome.error == outcome.error else ""
            what, note = outcome.detail or outcome.blocks, outcome.note.lstrip("; ")
            shown = [outcome.name, outcome.outcome, error, outcome.used, what, note]
            lines.append("| " + " | ".join(text.replace("|", "\\|") for text in shown) + " |")
    Path(path).write_text("\n".join(lines) + "\n")
