"""Every row of the zoo, measured once for each dtype: one test for each claim."""

import gc
import re

import numpy as np
import pytest
import torch

import tracker
import tracker.jacobians.rows
from tests.conftest import ROOT
from tests.support.measured import jacobians_at
from tests.support.models import FAMILIES
from tests.support.unchanged import assert_same
from tests.zoo import rows
from tests.zoo.claims import assert_jacobians, assert_states
from tests.zoo.rows import BIDIRECTIONAL, OPTIONS, OWN_CODE, POST_NORM, ROWS, WITH_NORM, seen, truth

of_rows = pytest.mark.parametrize("name", ROWS)
# What does not depend on a family
of_few = pytest.mark.parametrize(
    "name",
    [
        "gpt_neox",
        "llama, eager",
        "gpt_oss, sinks",
        "gemma2, soft cap",
        "timm vit",
        "nn.TransformerEncoder, sequence first, post-norm",
    ],
)
of_dtypes = pytest.mark.parametrize("dtype", ["float64", "float32"])


@of_rows
@of_dtypes
def test_jacobians_and_mis_couplings(name, dtype):
    assert_jacobians(seen(name, dtype).ds, truth(name))


# Of sample and token, or of sample, source and token
OF_TOKENS = [(0, 1), (1, 3)]
BETWEEN_TOKENS = [(0, 0, 3), (0, 1, 3), (1, 2, 3), (0, 3, 1), (1, 3, 0)]


@of_rows
@pytest.mark.parametrize("at", [OF_TOKENS, BETWEEN_TOKENS], ids=["of tokens", "between tokens"])
def test_the_path_of_jacobians(name, at):
    """Without the model's answers, after which another path would take the place of one that errs."""
    of, expected = seen(name, "float64"), truth(name)
    normed = expected.norm is not None
    path = "own code" if name in OWN_CODE else "full sequence" if FAMILIES[name].full else "formula"
    later = [bool(source) and source[0] > token for _, *source, token in at]
    J = [expected.jacobians(token, *source, normed=normed)[b] for b, *source, token in at]
    found = jacobians_at(of.model, of.inputs, at, final_norm=normed)
    for (of_block, checks), right in zip(found, torch.stack(J, 1), strict=True):
        atol = 1e-10 * max(1, float(right.abs().max()))
        torch.testing.assert_close(of_block, right, rtol=0, atol=atol)
        assert checks.path == path
        assert bool(of_block[later].any()) == (any(later) and name in BIDIRECTIONAL)


@of_rows
def test_states(name):
    assert_states(seen(name, "float64").ds, truth(name))


@of_rows
@of_dtypes
def test_the_path_and_what_is_said(name, dtype):
    of, full = seen(name, dtype), FAMILIES[name].full
    assert (of.ds.diagnostics_sliced == (not full)).all()
    assert bool(of.ds.attrs["post_norm"]) == (name in POST_NORM)
    assert of.ds.attrs["final_norm"] == ("include" if name in WITH_NORM else "exclude")
    expected = [r"block 1 \(.*\) is measured over the full sequence"] if full else []
    if name in POST_NORM:
        expected.append(
            "the state enters the blocks of this model through norms alone .*not with the null level"
        )
    assert len(of.said) == len(expected), of.said
    for text in expected:
        assert any(re.match(text, said) and file == rows.__file__ for file, said in of.said)


@of_rows
@of_dtypes
def test_the_model_agrees(name, dtype):
    """With the Jacobians, and these with differences of values."""
    ds = seen(name, dtype).ds
    said = ds.attrs["witness"]
    assert said.startswith("agrees at one row of each block; errors: "), said
    errors = dict(part.split() for part in said.split(": ")[1].split(", "))
    assert float(errors["values"]) < 1e-5 and float(errors["derivative"]) < 1e-3
    assert 0 < float(errors["differences"]) < 2e-2
    assert ds.attrs["independent_checks"] == "{}"
    assert ds.diagnostics_independent_error.max() < 3e-3


@of_rows
@of_dtypes
def test_the_model_is_unchanged(name, dtype):
    of = seen(name, dtype)
    assert_same(of.before, of.after)
    assert not of.fired and of.ds.attrs["padding"] == "none"


@of_few
def test_a_prompt_alone_in_little_memory(name):
    """What is recorded and the Jacobians go to files, and few products run at once."""
    of, options = seen(name, "float64"), OPTIONS | {"tokens": [-1], "witness": "off"}
    alone = tracker.measure(
        of.model, of.inputs[1:], dtype="float64", memory_budget=50_000, **options
    )
    assert_close(alone, of.ds.isel(prompt=[1], token=[1]), 1e-8)


def assert_close(found, expected, atol):
    for name in found.data_vars:
        # Not errors themselves; the last token of a window may be right from a single row.
        if "prompt" in found[name].dims and "_error" not in name and "sliced" not in name:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=atol, atol=atol, err_msg=name
            )


@of_rows
@pytest.mark.filterwarnings("ignore:block 1|the blocks of this model end")
def test_another_device(name, pretend):
    """Its values and the decisions of all checks are the CPU's, and its memory is given back."""
    of = seen(name, "float64")
    gc.disable()
    try:
        before = pretend.live_bytes()
        found = tracker.measure(
            of.model, of.inputs, dtype="float64", device=pretend.device, **OPTIONS
        )
        assert pretend.live_bytes() == before, (
            "a reference cycle keeps weights until it is collected"
        )
    finally:
        gc.enable()
    assert {*found, "jacobian"} == {*of.ds}
    assert (found.diagnostics_sliced == of.ds.diagnostics_sliced).all()
    # Some norms compute in float32 whatever the dtype, and expodistance divides by a mean near zero.
    assert_close(found, of.ds, 1e-6)


@of_few
@pytest.mark.parametrize("path", ["own code", "full sequence"])
@pytest.mark.filterwarnings("ignore")
def test_without_faster_paths(name, path, monkeypatch):
    paths = tracker.jacobians.rows.PATHS
    slower = {name: paths[name] for name in paths if name == path}
    monkeypatch.setattr(tracker.jacobians.rows, "PATHS", slower)
    of = seen(name, "float64")
    ds = tracker.measure(of.model, of.inputs, dtype="float64", keep="jacobian", **OPTIONS)
    assert (ds.diagnostics_sliced == bool(slower)).all()
    assert_jacobians(ds, truth(name))


def test_the_table_in_the_docs_is_that_of_the_zoo():
    """`python -m tests.architectures` writes it."""
    lines = (ROOT / "docs" / "architectures.md").read_text().splitlines()
    cells = [line.removeprefix("| ").split(" | ") for line in lines]
    listed = {row[0]: row[1] for row in cells if len(row) == 5 and row[1] in ("sliced", "full")}
    assert listed == {name: "full" if row.full else "sliced" for name, row in FAMILIES.items()}
    assert [*listed.values()].count("sliced") >= 25
