"""The argument parser of all command lines: one message for an argument that is not allowed."""

import re
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from checkpoints.cli import USAGE

CLUSTERS_HELP = (
    "results that are not independent, as NAME=CLUSTER,NAME=CLUSTER: each fit is repeated with one point per cluster, its "
    "mean; default: variants of one model, recognised by name (-deduped, -seedN) and size"
)


class Parser(ArgumentParser):
    """A jsonargparse parser that reports an error as the commands do: `error: --k 'ten'; give whole numbers ...`."""

    def error(self, message: str, ex: Any = None) -> NoReturn:
        """Print a message and leave with status USAGE."""
        message = re.sub(
            r"^(?:argument (--\w+): |Parser key \"(\w+)\":\s+)", lambda m: f"{m[1] or '--' + m[2]} ", message
        )
        message = re.sub(
            r"Expected a typing\.Literal\[(.*?)\]\. Got value: (\S*)",
            lambda m: f"{m[2]}; choose from {m[1].replace(chr(39), '')}",
            message,
        )
        self.exit(USAGE, f"error: {message}\n({self.prog} --help lists the options)\n")


def summary(command: type) -> str:
    """Return the description of a command: the docstring of its dataclass, without the arguments."""
    return (command.__doc__ or "").split("Args:")[0]
