"""Use a model as people do before they measure it, and compare what is measured before and after."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tests.sweep import oracle
from tests.sweep.catalogue import Built

# Tried in this order: attention without gradients may refuse to return its weights.
OPTIONS = [
    {"output_hidden_states": True, "output_attentions": True, "return_dict": True},
    {"output_hidden_states": True, "return_dict": True},
    {},
]
ROUNDING = 1e-10  # relative and absolute, in float64: the expodistance of a tiny model may be 1e6
OF_THE_RUN = ("seconds", "created")  # attributes of a Dataset


def use(built: Built) -> list[str]:
    """Run the model in inference mode with all optional outputs that it takes, then backward, then let it generate.

    Returns:
        What ran; a model need not be able to do all of it.
    """
    model = built.model.eval()
    done = []
    with torch.inference_mode():
        for options in OPTIONS:
            if _runs(lambda options=options: model(**_inputs(built), **options)):
                done.append(
                    "attentions"
                    if "output_attentions" in options
                    else "hidden states"
                    if options
                    else "forward"
                )
                break
    if _runs(
        lambda: sum(value.sum() for value in oracle.floats(model(**_inputs(built)))).backward()
    ):  # type: ignore[union-attr]
        done.append("backward")
    model.zero_grad(set_to_none=True)
    if built.text and getattr(model, "can_generate", bool)():
        if _runs(
            lambda: model.generate(
                **_inputs(built), max_new_tokens=2, do_sample=False, pad_token_id=0
            )
        ):
            done.append("generate")
    return done


def output(model: nn.Module, built: Built) -> list[Tensor]:
    """The floating tensors that a copy of the model returns in eval mode."""
    with torch.no_grad():
        return list(oracle.floats(copy.deepcopy(model).eval()(**_inputs(built))))


def identical(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether two outputs agree bit for bit."""
    return len(before) == len(after) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(before, after, strict=True)
    )


def difference(fresh: xr.Dataset | str, used: xr.Dataset | str) -> str:
    """What differs between two measurements, or the messages of two refusals; empty if nothing does."""
    # The reasons; RWKV rescales its own weights at first use, and other lines can be proposed then.
    first, second = (
        said.splitlines()[0] if isinstance(said, str) else "" for said in (fresh, used)
    )
    if isinstance(fresh, str) or isinstance(used, str):
        return "" if first == second else f"refused: {first or 'not'}; after use: {second or 'not'}"
    names = [name for name in {**fresh, **used} if not _equal(fresh.get(name), used.get(name))]
    names += [
        name
        for name in sorted({**fresh.attrs, **used.attrs}.keys() - {*OF_THE_RUN})
        if str(fresh.attrs.get(name)) != str(used.attrs.get(name))
    ]
    return ", ".join(map(str, names[:4])) + (f" and {len(names) - 4} more" if names[4:] else "")


def by_rounding(fresh: xr.Dataset | str, used: xr.Dataset | str) -> bool:
    """Whether two measurements differ by rounding alone: a model may replace its modules at first use (BigBird's attention)."""
    if (
        isinstance(fresh, str)
        or isinstance(used, str)
        or fresh.variables.keys() != used.variables.keys()
    ):
        return False
    # Errors are not measured to such a precision.
    names = [str(name) for name in fresh.variables if "_error" not in str(name)]
    numbers = [name for name in names if fresh[name].dtype.kind == "f"]
    return all(
        np.allclose(fresh[n], used[n], rtol=ROUNDING, atol=ROUNDING, equal_nan=True)
        for n in numbers
    )


def _equal(a: xr.DataArray | None, b: xr.DataArray | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and a.identical(b)


def _inputs(built: Built) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in built.inputs.items()}


def _runs(call: Callable[[], Any]) -> bool:
    """Whether a call runs: a tiny model, or its library, may raise anything."""
    try:
        call()
    except Exception:
        return False
    return True
