"""The outcomes of a sweep: a row for each class in a CSV file, and a page in Markdown that counts them."""

import collections
import csv
from collections.abc import Sequence
from pathlib import Path

from tests.sweep.judge import Outcome

PATH = str(Path(__file__).parent.parent.parent / "docs" / "sweep.md")
FAULTS = ("wrong", "raw exception", "changed", "differs after use")
ORDER = ("right", "refused", *FAULTS, "no oracle", "too slow", "not built")
COLUMNS = ("group", "class", "outcome", "error", "used", "reason or blocks", "note")


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many classes had each outcome."""
    found = collections.Counter(outcome.outcome for outcome in outcomes)
    return {name: found[name] for name in ORDER if found[name]}


def write(path: str, outcomes: Sequence[Outcome], command: str):
    """Write the page, and beside it a CSV file of the same name with a row for every class."""
    Path(path).write_text(page(outcomes, command, f"{Path(path).stem}.csv"))
    with Path(path).with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for outcome in outcomes:
            error = f"{outcome.error:.0e}" if outcome.error == outcome.error else ""
            what, note = outcome.detail or outcome.blocks, outcome.note.lstrip("; ")
            rows.writerow(
                [outcome.group, outcome.name, outcome.outcome, error, outcome.used, what, note]
            )


def page(outcomes: Sequence[Outcome], command: str, rows: str) -> str:
    """Return the page: what the outcomes mean, how many classes of each group had which, and those that are at fault."""
    import timm
    import torch
    import transformers

    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, timm {timm.__version__}"
    return f"""# Sweep

Written by `{command}` with {versions}.
Every class that builds from a tiny random configuration is measured in float64 (float32 where the note says so) and compared
with gradients between the hidden states of one forward pass of the model. [{rows}]({rows}) has a row for each class:
its group, outcome, error, use, blocks or the reason why there are none, and notes.

- **right**: the blocks are all the blocks that lead to the output, in order; singular values, mis-couplings (all but
  `miscoupling_release_trace`) and the trajectory measures agree with the comparison. *Error* is the largest: of singular
  values relative to the largest one, of mis-couplings relative to their conditioning (Wedin's bound).
- **refused**: a `UsageError`; its first line is the reason.
- **wrong**: other numbers, blocks or tokens. **raw exception**: another exception, although the model itself runs.
  **changed**: measuring changed the model.
- **differs after use**: measured again, after the model was used, it gives another Dataset (bit for bit) or another refusal.
  *Used* says what ran before: a forward pass in inference mode with hidden states and attentions as further outputs, as far
  as the class takes that; one with a backward pass; `generate`. Where use changes the model's own output, a note says so, and
  nothing is compared.
- **no oracle**: measured, but the comparison cannot be made. **too slow**: not done within the limit of time.
  **not built**: there is no tiny configuration, or the model does not run by itself.

{chr(10).join(table_of_counts(outcomes))}

At fault or too slow: {", ".join(unsettled(outcomes)) or "none"}.
"""


def table_of_counts(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the table: for each group and for all, how many classes had each outcome, and the largest error."""
    groups = list(dict.fromkeys(outcome.group for outcome in outcomes))
    lines = [
        "| group | " + " | ".join(ORDER) + " | all | largest error |",
        "|" + "---|" * (len(ORDER) + 3),
    ]
    for group in [*groups, "all"]:
        of = [outcome for outcome in outcomes if group in (outcome.group, "all")]
        found = counts(of)
        numbers = [str(found.get(name, 0)) for name in ORDER]
        errors = [outcome.error for outcome in of if outcome.outcome == "right"]
        largest = f"{max(errors):.0e}" if errors else ""
        lines.append("| " + " | ".join([group, *numbers, str(len(of)), largest]) + " |")
    return lines


def unsettled(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the classes whose outcome is a fault, or that took too long, each with its outcome."""
    return [
        f"{outcome.name} ({outcome.outcome})"
        for outcome in outcomes
        if outcome.outcome in (*FAULTS, "too slow")
    ]


def read(path: str | Path) -> list[Outcome]:
    """Return the outcomes in the CSV file of a sweep."""
    with Path(path).open(newline="") as file:
        return [_outcome(row) for row in csv.DictReader(file)]


def _outcome(row: dict[str, str]) -> Outcome:
    what = {"blocks" if row["outcome"] == "right" else "detail": row["reason or blocks"]}
    error = float(row["error"] or "nan")
    return Outcome(
        row["class"],
        row["group"],
        row["outcome"],
        error=error,
        note=row["note"],
        used=row["used"],
        **what,
    )
