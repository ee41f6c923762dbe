"""The argument parser of all command lines, and texts of their help.

It has one spelling of flags, and one message for an argument that is not allowed.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tracker.common.command_line import USAGE
from tracker.common.errors import missing_extra

try:
    from jsonargparse import ArgumentParser
except ModuleNotFoundError as error:
    sys.exit(f"error: {missing_extra(error, 'this command')}")

CLUSTERS_HELP = (
    "results that are not independent, as NAME=CLUSTER,NAME=CLUSTER: each fit is repeated with one point per cluster, its "
    "mean; default: variants of one model, recognised by name (-deduped, -seedN) and size"
)
LOG_HELP = (
    "metrics that loggers receive: headline (about a dozen numbers), main (also every K with its null level, and "
    "quartiles), all, or names with commas between them, such as miscoupling/mean_offdiag,trajectory/*"
)

Command = TypeVar("Command")
NUMBERS = {"int": "a whole number", "float": "a number"}


class Parser(ArgumentParser):
    """A jsonargparse parser that reports an error as the commands do: `error: --k 'ten'; give whole numbers ...`.

    Flags are declared with underscores and may be given with hyphens: `--dry-run` is `--dry_run`. A boolean flag needs no
    value: `--allow_suspect` is `--allow_suspect true`.
    """

    def add_argument(self, *names: str, **options: Any) -> Any:
        """Declare an argument."""
        if options.get("type") is bool:
            options |= {"nargs": "?", "const": True}
        return super().add_argument(*names, **options)

    def arrange(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Group the flags in the help; the usage names those that are required alone.

        Args:
            groups: the names of flags, without hyphens, by the title of their group; other flags come last.
        """
        arranged: list[Any] = []
        for title, names in groups.items():
            group = self.add_argument_group(title)
            for name in names:
                action = self._option_string_actions[f"--{name}"]
                self._optionals._group_actions.remove(action)
                group._group_actions.append(action)
            arranged.append(group)
        arranged.append(self._optionals)
        self._optionals.title = "others"
        self._action_groups = arranged
        required = [
            f"--{action.dest} {action.dest.upper()}" for action in self._actions if action.required
        ]
        self.usage = " ".join(["%(prog)s", *required, "[flags]"])

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        """Read a command line."""
        return super().parse_args(
            _with_underscores(sys.argv[1:] if args is None else args), *more, **options
        )

    def error(self, message: str, ex: Any = None) -> NoReturn:
        """Print a message and leave with status USAGE."""
        message = re.sub(
            r"^(?:argument (--\w+): |Parser key \"(\w+)\":\s+)",
            lambda m: f"{m[1] or '--' + m[2]} ",
            message,
        )
        message = re.sub(
            r"Expected a typing\.Literal\[(.*?)\]\. Got value: (\S*)",
            lambda m: f"{m[2]}; choose from {m[1].replace(chr(39), '')}",
            message,
        )
        message = re.sub(
            r"Expected a <class 'bool'>\. Got value: (\S*)", r"\1; choose from true, false", message
        )
        message = re.sub(  # of a number that may be left out, after what else was tried
            r"(?:Does not validate.*)?Expected (?:a )?<class '(int|float)'>.*(?:Got|Given) value: (.*)",
            lambda m: f"{m[2]}; give {NUMBERS[m[1]]}",
            message,
            flags=re.DOTALL,
        )
        message = re.sub(r"(arguments are required: )\w+\.", r"\1", message)
        flags = [name for name in self._option_string_actions if name.startswith("--")]

        def as_flags(names: re.Match[str]) -> str:
            given = names[0].split(", ")
            return ", ".join(f"--{name}" if f"--{name}" in flags else name for name in given)

        message = re.sub(r"(?<=arguments are required: ).*", as_flags, message)
        if message.startswith("unrecognized arguments: "):
            close = [
                name
                for one in re.findall(r"--[\w]+", message)
                for name in get_close_matches(one, flags, 1)
            ]
            message += f"; did you mean {' or '.join(close)}?" if close else ""
            expanded = any(Path(word).exists() for word in message.split())
            message += (
                "; a pattern of files stands in quotes, or the shell replaces it by their names"
                if expanded
                else ""
            )
        self.exit(USAGE, f"error: {message}\n({self.prog} --help lists the options)\n")


def _with_underscores(arguments: Sequence[str]) -> list[str]:
    """Write underscores for hyphens in the names of flags, up to an argument `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = (
        re.sub(r"^--[^=]+", lambda m: "--" + m[0][2:].replace("-", "_"), one)
        for one in arguments[:end]
    )
    return [*flags, *arguments[end:]]


def parsed(command: type[Command], module: str, arguments: Sequence[str] | None) -> Command:
    """Read the command line of `python -m MODULE`, whose flags are the fields of a dataclass."""
    parser = Parser(prog=f"python -m {module}", description=summary(command))
    parser.add_class_arguments(command, as_group=False)
    return command(**parser.parse_args(arguments).as_dict())


def summary(command: type) -> str:
    """Return the description of a command: the docstring of its dataclass, without the arguments."""
    return (command.__doc__ or "").split("Args:")[0]
