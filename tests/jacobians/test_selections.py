"""Jacobians of several prompts together against those of each alone, and products in reduced precision."""

import warnings

import pytest
import torch

from tests.support.measured import CPU, recorded
from tests.support.models import build, tokens
from tracker.jacobians.rows import Jacobians
from tracker.jacobians.slicing import Rows
from tracker.linalg.jacobian import dense_jacobian
from tracker.model.global_state import preserve_global_state


@pytest.fixture(autouse=True)
def quiet():
    with preserve_global_state(CPU), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


LENGTHS = (7, 3, 9)
PROMPTS = [tokens(1, n) for n in LENGTHS]


@pytest.mark.parametrize(
    "name",
    [
        "gpt_neox",
        "llama, eager",
        "mistral, sliding window",
        "gpt2",
        "gptj",
        "gpt_oss, sinks",
        "opt",
        "bert",
        "mpt",
    ],
)
def test_prompts_of_different_length_together_and_alone(name):
    replica, passes = recorded(build(name)[0], PROMPTS, final_norm=True)
    rows = [Rows(torch.zeros(2, dtype=torch.long), torch.tensor([1, n - 1])) for n in LENGTHS]
    for calls in zip(*passes, strict=True):
        together = Jacobians(replica)(list(zip(calls, rows, strict=True)))
        for (J, checks), call, some in zip(together, calls, rows, strict=True):
            ((alone, other),) = Jacobians(replica)([(call, some)])
            assert checks.path == other.path
            torch.testing.assert_close(J, alone, atol=1e-12, rtol=1e-12)


def test_only_the_prompt_that_fails_its_check_falls_back():
    replica, passes = recorded(build("gpt_neox")[0], PROMPTS, final_norm=True)
    calls = [calls[1] for calls in passes]
    # As if frozen at another moment
    calls[1].attention[0].value = 1.5 * calls[1].attention[0].value
    rows = [Rows(torch.tensor([0]), torch.tensor([n - 1])) for n in LENGTHS]
    selections = list(zip(calls, rows, strict=True))
    jacobians = Jacobians(replica)
    found = jacobians(selections)
    assert [checks.path for _, checks in found] == ["formula", "full sequence", "formula"]
    assert list(jacobians.fallbacks) == [2]


def test_tf32_is_allowed_for_the_products_alone(monkeypatch):
    model, inputs = build("gpt_neox")
    replica, (calls,) = recorded(model, [inputs], torch.float32, final_norm=True)
    in_passes, in_products = [], []
    calls[0].block.mlp.register_forward_hook(
        lambda *_: in_passes.append(torch.get_float32_matmul_precision())
    )

    def watched(*arguments):
        in_products.append(torch.get_float32_matmul_precision())
        return dense_jacobian(*arguments)

    def failing(*arguments):
        raise KeyboardInterrupt

    jacobians = Jacobians(replica, "tf32")
    selected = [(calls[0], Rows(torch.tensor([0]), torch.tensor([6])))]
    monkeypatch.setattr("tracker.jacobians.rows.dense_jacobian", watched)
    jacobians(selected)
    assert set(in_passes) == {"highest"} and in_products == ["high"]
    assert torch.get_float32_matmul_precision() == "highest"
    monkeypatch.setattr("tracker.jacobians.rows.dense_jacobian", failing)
    with pytest.raises(KeyboardInterrupt):
        jacobians(selected)
    assert torch.get_float32_matmul_precision() == "highest"
