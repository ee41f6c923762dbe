"""The choices of `measures=`. Nothing heavy is imported here: command lines read this file to print their help."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Option:
    """A choice of `measures=`."""

    name: str
    text: str
    default: bool = False
    needs: str = ""  # the option that it extends
    expensive: bool = False  # more than twice the cost of the default: measured only if named, not by "all"
    of_jacobians: Literal["", "products", "formed"] = (
        ""  # measured of each block, from products with J or from J itself
    )


OPTIONS = (
    Option("coupling", "mis-coupling of all pairs of blocks", default=True),
    Option("trajectory", "line-shape score, expodistance, norms of the states", default=True),
    Option("vju", "coupling with the sides of the bases swapped, V^T J U", needs="coupling"),
    Option("matrices", "the coupling matrices A, for the smallest K", needs="coupling"),
    Option("tokenwise", "coupling across tokens", expensive=True),
    Option("entropy", "entropy of the next token by depth"),
    Option("pca", "states on the principal plane of the last states"),
    Option("noise", "response of the states to noise on the embeddings"),
    Option(
        "products",
        "what the blocks do together to a small change of the state: amplification, effective rank, Lyapunov exponents",
        needs="coupling",
        of_jacobians="formed",
    ),
    Option(
        "depth_use",
        "how much each block changes the state, and whether its Jacobian accounts for that",
        needs="coupling",
        of_jacobians="products",
    ),
    Option(
        "directions",
        "words that the singular directions of each block stand for, by the unembedding",
        needs="coupling",
        of_jacobians="products",
    ),
    Option(
        "halves",
        "attention and MLP of each block apart, where its modules show them",
        needs="coupling",
        expensive=True,
        of_jacobians="formed",
    ),
    Option("normality", "how symmetric the Jacobians are", needs="coupling", of_jacobians="formed"),
    Option(
        "eigenvalues",
        "departure of the Jacobians from normality",
        needs="coupling",
        expensive=True,
        of_jacobians="formed",
    ),
)


def choices() -> tuple[str, ...]:
    """Return the names that `measures=` takes besides "all"."""
    return tuple(option.name for option in OPTIONS)


def expensive() -> tuple[str, ...]:
    """Return the names that "all" leaves out."""
    return tuple(option.name for option in OPTIONS if option.expensive)


def everything() -> tuple[str, ...]:
    """Return what `measures=` takes to measure all of it."""
    return ("all", *expensive())


def includes(measures: Collection[str], name: str) -> bool:
    """Whether `measures=` requests a name, itself or by "all"."""
    return name in measures or ("all" in measures and name not in expensive())


def defaults() -> tuple[str, ...]:
    """Return the names that are measured where `measures=` is not given."""
    return tuple(option.name for option in OPTIONS if option.default)
