"""States and Jacobians of a model in float64, by gradients in the graph of one pass. Nothing here is the tracker's."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tests import brute_force
from tests.measures.formulas import OF_PATHS


class Truth:
    """What a model computes, block by block.

    Each sample passes d times, and copy i stands for coordinate i of the output: one backward pass from a block's output to its
    input gives the Jacobians of all samples there.

    Args:
        model: in float64, and in eval mode; all weights will have gradients.
        inputs: of B samples.
        blocks: the names of the L blocks.
        norm: the name of the final norm, "" without one.
        d: the width.
    """

    def __init__(
        self, model: nn.Module, inputs: Tensor, blocks: Sequence[str], norm: str, d: int
    ) -> None:
        self.d, self.L, self.norm = d, len(blocks), norm
        self.x: list[Tensor] = []
        self.y: list[Tensor] = []
        handles = []
        model.requires_grad_()
        for block in map(model.get_submodule, blocks):
            enter = block.register_forward_pre_hook(lambda _, args: self.x.append(args[0]))
            leave = block.register_forward_hook(
                lambda _, args, output: self.y.append(
                    output[0] if isinstance(output, tuple) else output
                )
            )
            handles += [enter, leave]
        given = inputs.double() if inputs.is_floating_point() else inputs
        with torch.enable_grad():
            model(given.repeat_interleave(d, dim=0))
            if norm:
                self.x.append(self.x[-1])
                self.y.append(model.get_submodule(norm)(self.y[-1]))
        for handle in handles:
            handle.remove()
        self.batch_first = len(self.x[0]) == len(inputs) * d
        states = [self.x[0], *self.y]
        self.states = torch.stack([self._turned(state)[::d] for state in states], 1).detach()
        self._gradients = cache(self._gradients)

    def _turned(self, state: Tensor) -> Tensor:
        """Exchange samples and tokens if the blocks take tokens first."""
        return state if self.batch_first else state.transpose(0, 1)

    def paths(self, normed: bool = False) -> Tensor:
        """Return the states (B, L + 1, n, d); with `normed`, the last one is that after the final norm."""
        return torch.cat([self.states[:, : self.L], self.states[:, [-1 if normed else self.L]]], 1)

    def _gradients(self, l: int, token: int) -> Tensor:
        """Return d y_token / d x_source of a block, (B, d, n, d)."""
        y = self._turned(self.y[l])
        copies = torch.arange(len(y))
        of_each = y[copies, token, copies % self.d].sum()
        (found,) = torch.autograd.grad(of_each, self.x[l], retain_graph=True)
        return self._turned(found).unflatten(0, (-1, self.d))

    def jacobians(self, token: int, source: int | None = None, normed: bool = False) -> Tensor:
        """Return d (y - x)_token / d x_source of every block and sample, (B, L, d, d); None: the token itself."""
        at = token if source is None else source
        last = self.L if normed else self.L - 1
        J = torch.stack(
            [self._gradients(l, token)[:, :, at] for l in [*range(self.L - 1), last]], 1
        )
        return J - (at == token) * torch.eye(self.d, dtype=J.dtype)


TOLERANCE = {"float64": (1e-10, 1e-8), "float32": (1e-5, 1e-5)}  # of Jacobians, of mis-couplings


def conditioning(s: Tensor, k: int) -> float:
    """Return how much more than an error in J a mis-coupling may err: singular vectors turn by error / gap (Wedin)."""
    return max(1.0, float((s[..., :1] / -s[..., : k + 1].diff()).max()) / 10)


def jacobian_error(ds: xr.Dataset, truth: Truth) -> float:
    """Return the largest difference of a kept Jacobian's entry, relative to its largest entry where that is above 1."""
    positions = ds.token_position.values[0].astype(int)
    J = torch.stack([truth.jacobians(token) for token in positions], 1)
    largest = J.abs().amax((-2, -1), keepdim=True).clamp(min=1)
    return float(((torch.as_tensor(ds.jacobian.values) - J).abs() / largest).max())


def assert_jacobians(ds: xr.Dataset, truth: Truth) -> None:
    """Assert that kept Jacobians, singular values and mis-couplings are those of the blocks, without and with the final norm."""
    assert ds.diagnostics_complete.all()
    assert ("miscoupling_normed" in ds) == bool(truth.norm)
    of_jacobians, of_couplings = TOLERANCE[ds.attrs["dtype"]]
    assert jacobian_error(ds, truth) <= of_jacobians
    ends = {"": False} | ({"_normed": True} if truth.norm else {})
    for i, token in enumerate(ds.token_position.values[0].astype(int)):
        found = ds.isel(token=i)
        for end, normed in ends.items():
            J = truth.jacobians(token, normed=normed)
            s = torch.linalg.svdvals(J)
            seen = torch.as_tensor(found[f"singular_value{end}"].values)
            of_values = (seen - s[..., : seen.shape[-1]]).abs().amax(-1) / s[..., 0].clamp(min=1)
            assert of_values.max() <= 10 * of_jacobians
            for k in ds.k.values.tolist():
                # Only in float32 do near-degenerate pairs cost digits that the tolerance does not leave.
                factor = conditioning(s, k) if ds.attrs["dtype"] == "float32" else 1
                for name, values in brute_force.couplings(J, k).items():
                    scale = max(1, float(values.max())) if name == "offdiag" else 1
                    np.testing.assert_allclose(
                        found[f"{name}{end}"].sel(k=k), values, rtol=0, atol=factor * of_couplings * scale,
                        err_msg=name,
                    )  # fmt: skip


def assert_states(ds: xr.Dataset, truth: Truth) -> None:
    """Assert that what is measured of the states, in float64, is what formulas give for the path of each token."""
    for name, formula in OF_PATHS.items():
        for normed in (False, True) if truth.norm else (False,):
            variable = f"{name}_normed" if normed else name
            if variable not in ds or name.endswith("_window"):
                continue
            paths = truth.paths(normed).transpose(1, 2)
            expected = np.array([[formula(path.numpy()) for path in of_one] for of_one in paths])
            found = ds[variable].transpose("prompt", "position", ...).values
            if name == "expodistance":
                # Undefined where norms keep the length of the state.
                growth = np.log(np.linalg.norm(paths, axis=-1))
                still = np.abs(growth[..., -1] - growth[..., 0]) < 1e-13
                assert (np.isnan(found) <= still).all()
                found, expected = found[~still], expected[~still]
            np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9, err_msg=variable)
