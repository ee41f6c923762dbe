"""Measure the estimate of `tracker.coupling_penalty`: `python -m benchmarks.penalty`.

Three results, on checkpoints of the embedded suite `nano`: bias and standard deviation of the estimate for several numbers of
probes, beside the exact penalty; the exact penalty beside mis-coupling over training; and the time of a training step with the
penalty and without, in turn.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.machine import Clock, environment, keep
from tracker.common.command_line import OK, reports_errors

PROBES = (1, 2, 4, 8)


@dataclass
class Run:
    """Measure bias, variance and cost of the coupling penalty on nano.

    Args:
        steps: checkpoints whose exact penalty is compared with mis-coupling; the last one's estimate is examined.
        draws: number of estimates for each number of probes.
        sequences: number of sequences in a training step.
        length: tokens in each.
        repeats: number of pairs of training steps, after one to warm up.
        out: JSON file for the result.
    """

    steps: tuple[int, ...] = (0, 32, 256)
    draws: int = 200
    sequences: int = 16
    length: int = 128
    repeats: int = 7
    out: Path | None = None


def examine(run: Run) -> dict[str, Any]:
    """Return the results as plain numbers."""
    import torch

    import tracker
    from checkpoints import nano

    torch.manual_seed(0)
    course = []
    for step in run.steps:
        model, tokenizer = nano.load(step=step)
        ids = torch.tensor(tokenizer(Path(nano.__file__).read_text())["input_ids"][: 4 * 64]).view(4, 64)
        ds = tracker.measure(model, ids, k=10, measures="coupling", final_norm="exclude", keep="jacobian")
        J = torch.tensor(ds.jacobian.values)[:, 0].transpose(0, 1)  # (L, samples, d, d)
        L, d = len(J), J.shape[-1]
        exact = statistics.mean(_exact(J[a], J[b]) for a, b in combinations(range(L), 2))
        apart = ds.layer != ds.layer_other
        measured = {name: ds[name] for name in ("miscoupling", "offdiag_normalized")}
        measured |= {f"{name}_null": tracker.null_level(ds, name) for name in measured}
        means = {name: float(values.where(apart).mean()) for name, values in measured.items()}
        course.append({"step": step, "penalty": exact, **means})
    pair = [(2, 5)]
    exact = _exact(J[1], J[4])
    estimates = {}
    for probes in PROBES:
        drawn = [
            float(tracker.coupling_penalty(model, ids, pairs=pair, probes=probes).detach()) for _ in range(run.draws)
        ]
        mean, deviation = statistics.mean(drawn), statistics.stdev(drawn)
        error = deviation / run.draws**0.5
        estimates[probes] = {"bias": mean - exact, "standard_error_of_the_bias": error, "standard_deviation": deviation}
    return {
        "run": {**asdict(run), "out": None},
        "null": 1 - 1 / d,
        "course": course,
        "exact": exact,
        "estimates": estimates,
        "seconds": _time_steps(run, model),
        "environment": environment("cpu"),
    }


def _exact(Ja: Any, Jb: Any) -> float:
    """Return the mean over samples of the penalty of a pair, from its Jacobians (samples, d, d)."""
    C, R = Ja.mT @ Jb, Ja @ Jb.mT
    asymmetric = (C - C.mT).square().sum((1, 2)) + (R - R.mT).square().sum((1, 2))
    return float((asymmetric / (2 * C.square().sum((1, 2)) + 2 * R.square().sum((1, 2)))).mean())


def _time_steps(run: Run, model: Any) -> dict[str, Any]:
    import torch

    import tracker

    ids = torch.randint(model.config.vocab_size, (run.sequences, run.length))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    clock = Clock("cpu")
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for repeat in range(run.repeats + 1):
        for variant, spent in seconds.items():
            started = clock.now()
            loss = model(input_ids=ids, labels=ids).loss
            if variant == "with":
                loss = loss + 0.1 * tracker.coupling_penalty(model, ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if repeat:  # the first pair warms up
                spent.append(clock.now() - started)
    ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    return {**seconds, "ratio": statistics.median(ratios)}


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    from tracker.common.parser import Parser

    parser = Parser(prog="python -m benchmarks.penalty", description=Run.__doc__ and Run.__doc__.split("Args:")[0])
    parser.add_class_arguments(Run, as_group=False)
    run = Run(**parser.parse_args(arguments).as_dict())
    result = examine(run)
    print(f"step  penalty (null {result['null']:.3f})  mis-coupling (null)  off-diagonal, normalized (null)")
    for row in result["course"]:
        print(
            f"{row['step']:4d}  {row['penalty']:.3f}  {row['miscoupling']:.3f} ({row['miscoupling_null']:.3f})  "
            f"{row['offdiag_normalized']:.3f} ({row['offdiag_normalized_null']:.3f})"
        )
    print(f"one pair at the last step: exact penalty {result['exact']:.3f}; of {run.draws} estimates each:")
    for probes, row in result["estimates"].items():
        print(
            f"{probes} probes: bias {row['bias']:+.4f} (standard error {row['standard_error_of_the_bias']:.4f}), "
            f"standard deviation {row['standard_deviation']:.3f}"
        )
    print(f"a training step with the penalty takes {result['seconds']['ratio']:.2f} times as long")
    if run.out is not None:
        keep(result, run.out)
    return OK


if __name__ == "__main__":
    sys.exit(main())
