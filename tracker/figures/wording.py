"""What to do where results do not suffice for a figure, in the terms of Python or of the command line."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """Texts of messages.

    Attributes:
        beside: what may be given in place of the name of a figure.
        option: how a caller gives an option, a template of `name` and `value`.
        again: how to measure again, a template of `names`, a list, and `flag`, the same with commas.
        steps: how to get more steps.
        untrained: how to get the untrained model as first step.
        scores: how to get scores.
        several: the form of several results.
    """

    beside: tuple[str, ...]
    option: str
    again: str
    steps: str
    untrained: str
    scores: str
    several: str

    def measure_again(self, names: Sequence[str]) -> str:
        """State how to measure with these names of measures."""
        return self.again.format(names=list(names), flag=",".join(names))


COMMAND = Wording(
    beside=("all", "list"),
    option="--{name} {value}",
    again="measure again: python -m tracker.pythia --model ... --measures {flag} --out OTHER",
    steps="measure more steps: --steps ...",
    untrained="walk with --steps 0,... or --untrained SEED",
    scores="give results with scores (a Pythia walk records its own, --scores FILE joins others) of several models",
    several="directories",
)
PYTHON = Wording(
    beside=(),
    option="{name}={value!r}",
    again="measure again with measures={names}",
    steps="give a store of several steps, or join measurements: xarray.concat([a.assign_coords(step=0), "
    "b.assign_coords(step=100)], 'step')",
    untrained="mark a measurement of an untrained model as such: ds.assign_coords(step=0)",
    scores="give stores of several models with scores (a walk over Pythia records its own)",
    several="a mapping from names to Datasets",
)
