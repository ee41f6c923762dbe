"""Train one vision transformer: `python -m vit.train --weight_decay 0.04 --drop_path 0.1`.

`--config NAME` reads a recipe of `vit/recipes` or a YAML file; other options override it. Without it, the recipe named
like the data set applies. No heavy module is imported before the arguments are read.
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

from tracker.common.command_line import (
    FAILED,
    INPUT_ERRORS,
    OK,
    CommandFailure,
    leaving_at_once,
    reports_errors,
)
from vit.cells import BusyError, is_done
from vit.recipe import DEFAULTS, FLAGS, RECIPES, Recipe, check, from_dict, recipe_file

RESUME = "interrupted; the same command continues from the last finished epoch"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    with leaving_at_once([signal.SIGINT], RESUME):
        return run(recipe_of(arguments))


def recipe_of(arguments: Sequence[str] | None) -> Recipe:
    """Return the recipe given on a command line."""
    from tracker.common.parser import Parser, summary
    from tracker.measures.options import add_flags

    parser = Parser(prog="python -m vit.train", description=summary(Recipe))
    parser.add_class_arguments(Recipe, as_group=False, skip={"options"})
    add_flags(parser, DEFAULTS, FLAGS)
    return from_dict(parse(parser, arguments))


def parse(parser: Any, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Read a command line with an optional `--config`; the other options override it."""
    names = sorted(file.stem for file in RECIPES.glob("*.yaml"))
    parser.add_argument(
        "--config", action="config", help=f"a recipe ({', '.join(names)}) or a YAML file"
    )
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    for i, word in enumerate(words):
        if word.startswith("--config="):
            words[i] = f"--config={recipe_file(word.partition('=')[2])}"
        elif i and words[i - 1] == "--config":
            words[i] = recipe_file(word)
    parsed = parser.parse_args(words)
    if not parsed.config and parsed.data in names:
        parsed = parser.parse_args(["--config", recipe_file(parsed.data), *words])
    return parsed.as_dict()


@reports_errors(interrupted=RESUME, usage=(*INPUT_ERRORS, BusyError))
def run(recipe: Recipe) -> int:
    """Train and print the result; return the exit status."""
    check(recipe)
    from vit.training import train

    if is_done(recipe.directory):
        print(f"{recipe.directory} is finished; choose another --out to train again")
    try:
        result = train(recipe, show=True)
    except OSError as error:
        raise CommandFailure(f"{error}; finished epochs are kept") from error
    if result["status"] != "finished":
        print(f"diverged: {result['reason']}; a smaller --lr may help", file=sys.stderr)
        return FAILED
    print(
        f"accuracy {result['accuracy']:.4f}, {result['seconds']:.0f} s; results in {recipe.directory}"
    )
    return OK


if __name__ == "__main__":
    sys.exit(main())
