"""What earlier measurements of a run or walk spare a later one.

Models of the same modules and hooks run the same code. The first one that a process measures is asked about all its blocks
(`witness`, `reachability`), and each block is checked in full. Of the later ones, every `TURNS`-th is asked, and blocks are
checked in full in turn, one in `TURNS` at each measurement: whether samples mix, and the derivative in the full sequence. What
training opens, such as a gate that is zero at first, in a block or beside it, is found within `TURNS` measurements. Blocks that
were measured over the full sequence are checked at each, since these checks choose that path. Every row keeps its value and its
J v against differences of its values.
"""

import json
from dataclasses import replace
from typing import Any

import xarray as xr
from torch import nn

from tracker.jacobians.witness import form_of
from tracker.measures.settings import Settings

TURNS = 4


class Earlier:
    """The measurements of a run or walk so far, by the modules and hooks of the models."""

    def __init__(self) -> None:
        # The number of measurements, and the blocks of the last one that can be spared
        self._of_forms: dict[Any, tuple[int, frozenset[int]]] = {}

    def spare(self, settings: Settings, model: nn.Module) -> Settings:
        """Return the settings of a model's measurement, with what need not be checked."""
        count, checked = self._of_forms.get(form_of(model), (0, frozenset()))
        spared = frozenset(l for l in checked if (l + count) % TURNS)
        return replace(settings, checked=spared, asks_model=count % TURNS == 0)

    def add(self, model: nn.Module, measured: xr.Dataset) -> None:
        """Note that a model was measured."""
        form = form_of(model)
        count, _ = self._of_forms.get(form, (0, frozenset()))
        full_sequences = map(int, json.loads(measured.attrs["fallbacks"]))
        layers = range(1, measured.sizes.get("layer", 0) + 1)
        self._of_forms[form] = count + 1, frozenset(layers) - set(full_sequences)
