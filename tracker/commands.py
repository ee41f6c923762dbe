"""One command for all of them: `block-coupling walk --model 70m` is `python -m tracker.pythia --model 70m`."""

import importlib
import sys
from collections.abc import Sequence

from tracker.common.command_line import OK, USAGE, reports_errors
from tracker.common.errors import require_own

# Subcommand -> the module that `python -m` runs, and what it does.
COMMANDS = {
    "walk": ("tracker.pythia", "measure published checkpoints one after another"),
    "report": ("tracker.report.write", "write the interactive page of results"),
    "figures": ("tracker.figures.__main__", "draw the paper's figures as PDF, PNG and CSV"),
    "replay": ("tracker.replay", "send stored results to loggers"),
    "vit-train": ("vit.train", "train one vision transformer and measure it"),
    "vit-grid": ("vit.grid", "train a grid of vision transformers"),
    "vit-analysis": ("vit.analysis", "relate accuracy to coupling in a grid"),
}


@reports_errors()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, with the arguments that follow its name; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in COMMANDS:
        module = COMMANDS[name][0]
        require_own(module.partition(".")[0])
        return importlib.import_module(module).main(rest)
    usage = "\n".join(f"  {name:13} {purpose}" for name, (_, purpose) in COMMANDS.items())
    if name in ("--help", "-h"):
        print(
            f"usage: block-coupling COMMAND [options]\n\n{usage}\n\nblock-coupling COMMAND --help lists the options"
        )
        return OK
    print(f"error: {name}; choose from\n{usage}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
