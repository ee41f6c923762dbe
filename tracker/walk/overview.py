"""What a walk prints: its plan, each checkpoint's result, repeated weights and other token ids."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tracker.common.steps import describe_repeat, find_repeats
from tracker.common.text import counted
from tracker.walk.plan import Plan

if TYPE_CHECKING:
    from tracker.loggers.protocol import Row


def print_overview(plan: Plan, missing: int) -> None:
    """Print what is measured, and which checkpoints are suspect."""
    selection, measurement = plan.selection, plan.measurement
    count, inputs = len(selection.checkpoints), measurement.inputs
    if isinstance(inputs, Mapping):
        inputs = next(value for value in inputs.values() if getattr(value, "ndim", 0))
    print(
        f"{selection.suite.name}: {counted(count, 'checkpoint')}, {count - missing} already measured; "
        f"{counted(len(inputs), 'prompt')}; {measurement.device}, "
        f"{measurement.settings.dtype}; results in {plan.output.store.path}",
        flush=True,
    )
    for notice in plan.notices:
        print(f"note: {notice}", flush=True)
    if selection.offline:
        print(f"note: {selection.offline}; what the cache holds is measured", flush=True)
    for action, suspect in (
        ("left out", selection.excluded),
        ("measured, and marked as suspect", selection.suspect),
    ):
        if suspect:
            print(f"{len(suspect)} of the selected revisions are suspect; they are {action}:")
            for step, reason in suspect.items():
                print(f"  step {step:>7}  {reason}", flush=True)
    if selection.excluded:
        print("--allow_suspect measures them too", flush=True)


def print_repeats(fingerprints: Mapping[int, str]) -> None:
    """Print which steps have the same weights."""
    for step, earlier in find_repeats(fingerprints).items():
        print(f"note: {describe_repeat(step, earlier)}", flush=True)


def print_other_tokens(hashes: Mapping[int, str]) -> None:
    """Print which steps were measured on other token ids."""
    from tracker.analysis.doubts import other_tokens

    for line in other_tokens(dict(sorted(hashes.items()))):
        print(f"note: {line}", flush=True)


def headline(row: "Row") -> str:
    """Return the result of a checkpoint in a few words."""
    from tracker.measures.registry import LSS, MEAN_OFFDIAG, MEAN_OFFDIAG_NULL

    parts = []
    if MEAN_OFFDIAG in row.scalars:
        value, null = row.scalars[MEAN_OFFDIAG], row.scalars[MEAN_OFFDIAG_NULL]
        parts.append(f"miscoupling {value:.3f} (null {null:.3f}, K={int(row.matrices['k'].min())})")
    if LSS in row.scalars:
        parts.append(f"LSS {row.scalars[LSS]:.2f}")
    return "  ".join(parts) or "measured"
