"""Log a store to a new run: `python -m tracker.replay results/nano --project block-coupling`.

The store is that of a walk or a training run. Every step is logged once, to W&B with heat maps. Heavy
imports come after the arguments are parsed, so that --help is quick.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tracker.common.command_line import OK, reports_errors
from tracker.common.parser import LOG_HELP
from tracker.common.values import LOG, PROJECT

if TYPE_CHECKING:
    from tracker.loggers.protocol import Log, Opener


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    from tracker.common.parser import Parser

    parser = Parser(
        prog="python -m tracker.replay",
        description="Log a store to a new run (W&B by default), every step once.",
    )
    parser.add_argument(
        "results", type=Path, help="directory of a walk (--out) or a training run (save_dir)"
    )
    parser.add_argument("--project", type=str, default=PROJECT, help="the W&B project")
    parser.add_argument("--name", type=str, help="name of the run; default: that of the directory")
    parser.add_argument(
        "--wandb",
        type=Literal["auto", "online", "offline"],
        default="auto",
        help="mode of the W&B run; auto is online if a key is set up, else offline",
    )
    parser.add_argument("--log", type=str, default=LOG, help=LOG_HELP)
    parsed = parser.parse_args(arguments)
    from tracker.loggers import prepare
    from tracker.loggers.protocol import parse_log

    name = parsed.name or parsed.results.resolve().name
    replay(parsed.results, parsed.project, name, prepare(parsed.wandb), parse_log(parsed.log))
    return OK


def replay(results: Path, project: str, name: str, openers: "Sequence[Opener]", log: "Log") -> None:
    """Log a store's units to new runs, in ascending order, and print where the runs are.

    Raises:
        FileNotFoundError: if there are no units.
        ValueError: if a unit is damaged; nothing is sent then.
    """
    from tracker.loggers import announce, opened
    from tracker.loggers.protocol import LoggedRun, Row
    from tracker.store import Store, require_steps

    store = Store(results)
    steps = require_steps(store)
    # All units are read before one is sent, to find a damaged one first.
    rows = [row for curve in store.curves(steps) for row in Row.from_curve(curve)]
    attributes = store.attributes(steps[-1])
    config = {
        "model": attributes["model_name"] or attributes["model_class"],
        "device": attributes["device"],
    }
    run = LoggedRun(store, project, name, config, new=True, log=log)
    announce(openers, run)
    with opened(openers, run) as send:
        for row in rows:
            send(row)


if __name__ == "__main__":
    sys.exit(main())
