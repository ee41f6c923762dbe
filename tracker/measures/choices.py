"""The choices of `measures=`. Nothing heavy is imported here: command lines read this file to print their help."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A choice of `measures=`."""

    name: str
    text: str
    default: bool = False
    needs: str = ""  # the option that it extends


OPTIONS = (
    Option("coupling", "mis-coupling of all pairs of blocks", default=True),
    Option("trajectory", "line-shape score, expodistance, norms of the states", default=True),
    Option("vju", "coupling with the sides of the bases swapped, V^T J U", needs="coupling"),
    Option("matrices", "the coupling matrices A, for the smallest K", needs="coupling"),
    Option("tokenwise", "coupling across tokens"),
    Option("entropy", "entropy of the next token by depth"),
    Option("pca", "states on the principal plane of the last states"),
    Option("noise", "response of the states to noise on the embeddings"),
)


def choices() -> tuple[str, ...]:
    """Return the names that `measures=` takes besides "all"."""
    return tuple(option.name for option in OPTIONS)


def defaults() -> tuple[str, ...]:
    """Return the names that are measured where `measures=` is not given."""
    return tuple(option.name for option in OPTIONS if option.default)
