"""Attention sinks: tokens whose state is far larger than what a block adds to it, as at position 0 of trained models."""

import pytest
import torch

import tracker
import tracker.jacobians.restriction
import tracker.jacobians.rows
from tests.support.brute_force import truth_of
from tests.support.measured import detached, jacobians_at
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
    ds = tracker.measure(model, inputs, k=4, tokens=[0])
    assert ds.diagnostics_sliced.all(), ds.attrs["fallbacks"]
    rows = [(0, 0), (1, 0), (1, 6)]
    seen = jacobians_at(
        model, inputs, rows, torch.float32, final_norm=ds.attrs["final_norm"] == "include"
    )
    right = truth_of(model.double().eval(), inputs, ds)
    of_rows = [right.jacobians(t, normed=right.norm is not None)[b] for b, t in rows]
    truth = torch.stack(of_rows, 1)
    # Root mean square of s
    size = torch.stack([torch.linalg.matrix_norm(J) / J.shape[-1] ** 0.5 for J in truth])
    hidden = size[:-1, :2] < FLOOR[torch.float32]  # the last block's norm gives -I
    assert hidden.any() and not (size[:, 2] < FLOOR[torch.float32]).any()
    for (J, _), expected in zip(seen, truth, strict=True):
        error = torch.linalg.matrix_norm(J - expected) / torch.linalg.matrix_norm(expected)
        assert float(error.max()) < 1e-4
    values = torch.from_numpy(ds.singular_value_normed.values[:, 0])
    expected = torch.stack([torch.linalg.svdvals(J[:2])[:, :4] for J in truth], 1)
    torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=0)


PLANTED = [
    (name, planted)
    for name in ("llama, grouped keys", "gpt_neox", "opt")
    for planted in ("key", "value")
]


@pytest.mark.parametrize(
    "name, planted", [*PLANTED, ("llama, grouped keys", "rotary"), ("gpt_neox", "rotary")]
)
def test_planted_errors_at_a_sink_are_found(monkeypatch, name, planted):
    """The sink attends to other tokens: alone, its output does not depend on its key."""
    model, inputs = with_sink(name, at=3)
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
    assert not ds.diagnostics_sliced.any()
