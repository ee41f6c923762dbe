"""Jacobians by central differences: of a block in full sequences, or of all, with the states, in complete passes of a model."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import tracker
from tests.support.brute_force import states_of

SAMPLE, TOKEN = 0, 2


def by_differences(
    f: Callable[[Tensor], Tensor], x: Tensor, at: tuple[int | slice, int], h: float = 1e-5
) -> Tensor:
    """Return J - I of a function of states at one row of x, or at a token of all samples, which do not mix."""

    def moved(step: Tensor) -> Tensor:
        y = x.clone()
        y[at] += step
        return f(y)[at]

    I = torch.eye(x.shape[-1], dtype=x.dtype)
    with torch.no_grad():
        columns = [(moved(h * step) - moved(-h * step)) / (2 * h) for step in I]
    return torch.stack(columns, -1) - I


def assert_right(
    ds: xr.Dataset,
    blocks: nn.Sequential,
    x: Tensor,
    atol: float,
    positions: Any = (-1,),
    h: float = 1e-5,
):
    """Assert that all Jacobians at these positions are those by differences in float64.

    Args:
        atol: relative to the largest entry of each Jacobian.
        positions: as `tokens=` of the measurement.
    """
    blocks, x = blocks.double(), x.double()
    found = torch.from_numpy(ds.jacobian.values).double()
    positions = range(x.shape[1]) if positions == "all" else positions
    assert found.shape[1] == len(positions)
    for l, block in enumerate(blocks):
        for i, t in enumerate(positions):
            expected = by_differences(block, x, (slice(None), t), h)
            largest = expected.abs().amax((1, 2), keepdim=True)
            torch.testing.assert_close(
                found[:, i, l] / largest, expected / largest, atol=atol, rtol=0
            )
        x = block(x).detach()


@torch.no_grad()
def differences(
    model: nn.Module, inputs: Any, blocks: Sequence[nn.Module], h: float
) -> tuple[Tensor, Tensor]:
    """Return the states (L + 1, d) of one token, and J - I (L, d, d) of each block there."""
    x, y = states_of(model, inputs, blocks)
    states = torch.stack([x[0], *y])[:, SAMPLE, TOKEN]
    I = torch.eye(states.shape[1], dtype=states.dtype)

    def moved(layer: int, step: Tensor) -> Tensor:
        def change(l: int, x: Tensor) -> Tensor:
            x[SAMPLE, TOKEN] += step if l == layer else 0
            return x

        return states_of(model, inputs, blocks, change)[1][layer][SAMPLE, TOKEN]

    columns = [
        torch.stack([(moved(l, h * step) - moved(l, -h * step)) / (2 * h) for step in I], 1)
        for l in range(len(blocks))
    ]
    return states, torch.stack(columns) - I


def assert_measured_as_it_runs(
    model: nn.Module,
    inputs: Any,
    blocks: Sequence[nn.Module],
    step: float = 1e-5,
    tolerance: float = 1e-7,
) -> xr.Dataset:
    """Check a measurement in float64 against differences; return it.

    Args:
        step: of the differences.
        tolerance: of the largest entry of the Jacobians.
    """
    options = dict(k=2, keep="jacobian", final_norm="exclude", dtype=torch.float64, tokens=[TOKEN])
    ds = tracker.measure(model, inputs, **options)
    states, jacobians = differences(model, inputs, blocks, step)
    np.testing.assert_allclose(ds.norm[SAMPLE, :, TOKEN], states.norm(dim=1), rtol=1e-6)
    np.testing.assert_allclose(
        ds.jacobian[SAMPLE, 0], jacobians, rtol=0, atol=tolerance * float(jacobians.abs().max())
    )
    return ds
