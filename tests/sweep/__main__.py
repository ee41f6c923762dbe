"""`python -m tests.sweep`: sweep the classes, each in a process of its own, and write docs/sweep.md and docs/sweep.csv."""

import argparse
import datetime
import multiprocessing
import re
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 120


def main() -> int:
    """The command line; the exit status is 1 where something is wrong, raises, changes its model or differs after use."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--only", default="", help="classes whose names contain this")
    parser.add_argument(
        "--group", action="append", help="causal, multimodal, encoder, vision, timm; all by default"
    )
    parser.add_argument(
        "--share",
        type=share,
        default=(0, 1),
        help="I/N: every N-th class from the I-th on; day/N: by the date",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="limit of one class")
    parser.add_argument(
        "--out", help="page to write, beside a CSV file; docs/sweep.md for a sweep of everything"
    )
    given = parser.parse_args()

    import torch
    import transformers

    from tests.sweep import catalogue, table

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    groups = given.group or catalogue.GROUPS
    todo = [
        (name, group) for group in groups for name in catalogue.classes(group) if given.only in name
    ]
    first, step = given.share
    todo = todo[first::step]
    outcomes = sweep(todo, given.processes, given.seconds)
    everything = not given.only and not given.group and step == 1
    out = given.out or (table.PATH if everything else None)
    if out:
        chosen = "".join(f" --group {group}" for group in given.group or ()) + (
            f" --only {given.only}" if given.only else ""
        )
        chosen += f" --share {first + 1}/{step}" if step > 1 else ""
        table.write(out, outcomes, "python -m tests.sweep" + chosen)
    counts = table.counts(outcomes)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(any(counts.get(outcome) for outcome in table.FAULTS))


def share(text: str) -> tuple[int, int]:
    """Where a share of the classes begins (0-based), and its step. `day/N` takes another share each day, all in N days."""
    read = re.fullmatch(r"(day|[1-9]\d*)/([1-9]\d*)", text)
    if read is None or (read[1] != "day" and int(read[1]) > int(read[2])):
        raise argparse.ArgumentTypeError(
            f"{text!r}; give I/N with I from 1 to N, such as 3/10, or day/N"
        )
    first, count = read.groups()
    N = int(count)
    return (datetime.date.today().toordinal() % N if first == "day" else int(first) - 1), N


def sweep(todo: list[tuple[str, str]], processes: int, seconds: float) -> list[Any]:
    """The outcome of every class, in the order of `todo`."""
    from tests.sweep.judge import Outcome

    context = multiprocessing.get_context("fork")
    waiting = [*enumerate(todo)][::-1]
    outcomes, running = {}, {}
    while waiting or running:
        while waiting and len(running) < processes:
            i, (name, group) = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_judge, args=(name, group, there))
            process.start()
            there.close()
            running[i] = process, here, time.monotonic() + seconds
        for i, (process, here, until) in list(running.items()):
            name, group = todo[i]
            if here.poll():
                try:
                    outcomes[i] = here.recv()
                except EOFError:
                    process.join()
                    outcomes[i] = Outcome(
                        name, group, "raw exception", f"the process ended with {process.exitcode}"
                    )
            elif time.monotonic() > until:
                process.kill()
                outcomes[i] = Outcome(name, group, "too slow", f"more than {seconds:.0f} s")
            if i in outcomes:
                process.join()
                del running[i]
                o = outcomes[i]
                print(
                    f"{o.outcome:14} {group:10} {name}: {o.error:.0e} {o.detail} [{o.blocks}] {o.note}",
                    flush=True,
                )
        time.sleep(0.02)
    return [outcomes[i] for i in range(len(todo))]


def _judge(name: str, group: str, there: Connection):
    from tests.sweep import catalogue
    from tests.sweep.judge import judge

    there.send(judge(name, group, catalogue.builder(name, group)))
    there.close()


if __name__ == "__main__":
    sys.exit(main())
