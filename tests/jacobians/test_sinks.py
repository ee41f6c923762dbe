"""Attention sinks: tokens whose state is far larger than what a block adds to it, as at position 0 of trained models."""

import pytest
import torch

import tracker
import tracker.jacobians.restriction
import tracker.jacobians.rows
from tests.support.brute_force import truth_of
from tests.support.measured import detached
from tests.support.models import Size, build
from tests.support.sinks import with_sink
from tracker.linalg.precision import FLOOR

FAMILIES = (
    "llama, grouped keys",
    "llama, eager",
    "gpt2",
    "gpt_neox",
    "qwen2",
    "qwen3, q/k norms",
    "gemma, one key head",
    "gemma2, soft cap",
    "opt",
)


@pytest.mark.filterwarnings("error:.*measured over the full sequence")
@pytest.mark.parametrize(
    ("name", "dimensions"),
    [(name, slice(None)) for name in FAMILIES] + [(name, slice(5, 6)) for name in FAMILIES[:4]],
)
def test_sinks_are_computed_from_single_rows_and_are_right(name, dimensions):
    model, inputs = with_sink(name, dimensions)
    ds = tracker.measure(model, inputs, k=4, tokens=[0, -1], keep="jacobian")
    assert ds.diagnostics_sliced.all(), ds.attrs["fallbacks"]
    truth, norm = truth_of(model.double().eval(), inputs, ds), torch.linalg.matrix_norm
    J = torch.stack([truth.jacobians(t) for t in (0, -1)], 1)
    # Root mean square of s
    hidden = norm(J) / J.shape[-1] ** 0.5 < FLOOR[torch.float32]
    assert hidden[:, 0].any() and not hidden[:, 1].any()
    error = norm(torch.from_numpy(ds.jacobian.values) - J) / norm(J)
    assert float(error.max()) < 1e-4
    normed = torch.linalg.svdvals(truth.jacobians(0, normed=truth.norm is not None))[..., :4]
    values = torch.from_numpy(ds.singular_value_normed.values[:, 0])
    torch.testing.assert_close(values.double(), normed, rtol=1e-4, atol=0)


SINKS = ("llama, grouped keys", "gpt_neox", "opt")
PLANTED = [(name, planted) for name in SINKS for planted in ("key", "value")]
PLANTED += [(name, "rotary") for name in SINKS[:2]]


@pytest.mark.parametrize("name, planted", [*PLANTED, ("", "key"), ("", "value")])
def test_planted_errors_are_found_also_at_a_sink(monkeypatch, name, planted):
    """Outputs agree to the last bit with a detached key or value. At the first token a sink's does not depend on its key."""
    size = Size(depth=1)
    model, inputs = with_sink(name, at=3, size=size) if name else build("gpt_neox", size)
    if planted == "rotary":
        slice_argument = tracker.jacobians.restriction.slice_argument

        def shifted(argument, value, call, rows):
            moved = tracker.jacobians.rows.Rows(rows.sample, (rows.token + 1) % call.x.shape[1])
            return slice_argument(
                argument, value, call, moved if argument == "position_embeddings" else rows
            )

        monkeypatch.setattr(tracker.jacobians.restriction, "slice_argument", shifted)
    else:
        paths = {
            path: detached(honest, planted) for path, honest in tracker.jacobians.rows.PATHS.items()
        }
        monkeypatch.setattr(tracker.jacobians.rows, "PATHS", paths)
    with pytest.warns(UserWarning, match="single rows"):
        ds = tracker.measure(model, inputs, k=4, tokens=[3])
    assert not ds.diagnostics_sliced.any() and ds.attrs["independent_checks"] == "{}"
