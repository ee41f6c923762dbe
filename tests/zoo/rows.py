"""The rows of the zoo, each measured once: `tests.models.FAMILIES`, and what is expected of each besides its path."""

import copy
import warnings
from dataclasses import dataclass
from functools import cache

import xarray as xr
from torch import Tensor, nn

import tracker
from tests.support.brute_force import Truth, truth_of
from tests.support.models import FAMILIES, build
from tests.support.unchanged import snapshot
from tracker.blocks.find import find_blocks

ROWS = tuple(FAMILIES)
POST_NORM = (
    "bert",
    "roberta",
    "nn.TransformerEncoder, post-norm, bidirectional",
    "nn.TransformerEncoder, sequence first, post-norm",
)
# Language models, whose head takes the states by a norm
WITH_NORM = tuple(
    name
    for name, family in FAMILIES.items()
    if family.sees == "text" and name not in POST_NORM and not name.startswith("nn.")
)
BIDIRECTIONAL = tuple(
    name
    for name, family in FAMILIES.items()
    if family.sees == "images" or "bert" in name or name.endswith("bidirectional")
)
# Rows whose attention has no formula that is known, and runs by its own code
OWN_CODE = ("gpt_neox, eager", "llama, eager", "gemma2, soft cap", "gpt_neo")
OPTIONS = {"k": [2, 6], "tokens": [1, -1]}


@dataclass
class Seen:
    """A measurement of a model that its owner trains, and what else it did.

    Attributes:
        before: a snapshot of the model and of the process.
        after: another one.
        fired: how often the owner's hooks ran.
        said: the file and the text of each warning.
    """

    model: nn.Module
    inputs: Tensor
    ds: xr.Dataset
    before: dict
    after: dict
    fired: int
    said: list[tuple[str, str]]


@cache
def seen(name: str, dtype: str) -> Seen:
    """Return what is measured of a row: a model with gradients, hooks, some modules in eval mode, and a frozen weight."""
    model, inputs = build(name)
    model.train()
    list(model.modules())[3].eval()
    next(model.parameters()).requires_grad_(False)
    fired = []
    for block in find_blocks(model).names:
        model.get_submodule(block).register_forward_hook(lambda *_: fired.append(1))
    out = model(inputs)
    (out if isinstance(out, Tensor) else out[0]).square().mean().backward()
    fired.clear()
    before = snapshot(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds = tracker.measure(model, inputs, dtype=dtype, keep="jacobian", **OPTIONS)
    said = [(warning.filename, str(warning.message)) for warning in caught]
    return Seen(model, inputs, ds, before, snapshot(model), len(fired), said)


@cache
def truth(name: str) -> Truth:
    """Return what a row computes, in float64."""
    of = seen(name, "float64")
    model = copy.deepcopy(of.model).double().eval()
    if hasattr(getattr(model, "config", None), "_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    inputs = of.inputs.double() if of.inputs.is_floating_point() else of.inputs
    return truth_of(model, inputs, of.ds)
