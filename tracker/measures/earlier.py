"""What earlier measurements of a run or walk spare a later one.

Models of the same modules and hooks run the same code. The first one that a process measures is asked about all its blocks
(`witness`, `reachability`), and each block is checked in full. Of the later ones, every `TURNS`-th is asked, and blocks are
checked in full in turn, one in `TURNS` at each measurement: whether samples mix, and the derivative in the full sequence. What
training opens, such as a gate that is zero at first, in a block or beside it, is found within `TURNS` measurements. Blocks that
were measured over the full sequence are checked at each, since these checks choose that path. Every row keeps its value and its
J v against differences of its values. An error names the steps that were measured since the last check of everything.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import xarray as xr
from torch import nn

from tracker.common.errors import UsageError
from tracker.common.text import join_names
from tracker.jacobians.witness import form_of
from tracker.measures.settings import Settings

TURNS = 4


@dataclass(frozen=True)
class _Past:
    """The measurements of models of one form.

    Attributes:
        count: how many there were.
        checked: the blocks that can be spared.
        spared: the steps of the last ones that spared any check, at most those between two checks of a block.
    """

    count: int = 0
    checked: frozenset[int] = frozenset()
    spared: tuple[int, ...] = ()


class Earlier:
    """The measurements of a run or walk so far, by the modules and hooks of the models."""

    def __init__(self) -> None:
        self._of_forms: dict[Any, _Past] = {}

    def spare(self, settings: Settings, model: nn.Module) -> Settings:
        """Return the settings of a model's measurement, with what need not be checked."""
        past = self._of_forms.get(form_of(model), _Past())
        return replace(
            settings,
            checked=frozenset(l for l in past.checked if (l + past.count) % TURNS),
            asks_model=past.count % TURNS == 0,
            spared=past.spared,
        )

    def add(self, model: nn.Module, measured: xr.Dataset, step: int) -> None:
        """Note that a model was measured."""
        form = form_of(model)
        past = self._of_forms.get(form, _Past())
        full_sequences = map(int, json.loads(measured.attrs["fallbacks"]))
        layers = range(1, measured.sizes.get("layer", 0) + 1)
        # The first measurement spares nothing.
        spared = (*past.spared, step)[1 - TURNS :] if past.count else ()
        self._of_forms[form] = _Past(
            past.count + 1, frozenset(layers) - set(full_sequences), spared
        )


@contextmanager
def naming_steps(spared: Sequence[int]) -> Iterator[None]:
    """Let an error name the steps whose measurements were not checked for all that this one is.

    Raises:
        UsageError: the same, with these steps at the end of its first line.
    """
    try:
        yield
    except UsageError as error:
        if spared:
            finding, *lines = str(error).split("\n")
            steps = f"Step{'s' * (len(spared) > 1)} {join_names(spared)}"
            finding += f" {steps}, measured with fewer checks, may have this fault, too."
            error.args = ("\n".join([finding, *lines]),)
        raise
