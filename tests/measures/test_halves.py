"""Attention and MLP apart: their Jacobians and measures, against brute force with one module's output replaced by a constant."""

import json
import warnings

import numpy as np
import pytest
import torch

import tracker
from tests import brute_force
from tests.models import Size, build
from tracker.blocks.find import find_blocks

MEASURES = ["coupling", "halves"]
K = 4
PARTS = {  # attention, MLP
    "gpt_neox": ("attention", "mlp"),
    "llama, grouped keys": ("self_attn", "mlp"),
    "timm vit": ("attn", "mlp"),
    "gpt_neox, sequential residual": ("attention", "mlp"),
}


def measured(name, **options):
    torch.manual_seed(0)
    model, inputs = build(name, Size(depth=2))
    model = model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    options = {"k": K, "measures": MEASURES, "dtype": "float64", "tokens": "last"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, inputs, tracker.measure(model, inputs, **options)


def half_jacobian(block, other, call, b, t):
    """Return the Jacobian at sample b, token t, of a block in which the output of `other` is the constant that it has."""
    (X, *args), kwargs = call
    held = []
    handle = other.register_forward_hook(lambda *given: held.append(given[-1]))
    block(X, *args, **kwargs)
    handle.remove()
    handle = other.register_forward_hook(lambda *_: held[0])

    def row(x):
        full = X.clone()
        full[b, t] = x
        out = block(full, *args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out)[b, t] - x

    J = torch.autograd.functional.jacobian(row, X[b, t])
    handle.remove()
    return J.detach()


@pytest.mark.parametrize("name", PARTS)
def test_against_brute_force(name):
    model, inputs, ds = measured(name)
    assert json.loads(ds.attrs["without_halves"]) == {}
    blocks = [model.get_submodule(one) for one in find_blocks(model).names]
    oracle = brute_force.run(model, inputs, blocks, None, True)
    calls = [((X, *args), kwargs) for X, (args, kwargs) in zip(oracle.inputs, oracle.calls, strict=True)]
    t = int(ds.token_position[0, 0])
    for l, (block, call) in enumerate(zip(blocks, calls, strict=True)):
        attention, mlp = (block.get_submodule(part) for part in PARTS[name])
        A = half_jacobian(block, mlp, call, 0, t)
        M = half_jacobian(block, attention, call, 0, t)
        I = torch.eye(len(A), dtype=A.dtype)
        parallel = name == "gpt_neox"
        whole = oracle.jacobian(l, 0, t, t).detach()
        # LLaMA's norms compute in float32 whatever the dtype.
        torch.testing.assert_close(A + M if parallel else (I + M) @ (I + A) - I, whole, rtol=0, atol=1e-6)
        U, s, Vh = torch.linalg.svd(whole)
        at = ds.isel(prompt=0, token=0, layer=l)
        np.testing.assert_allclose(at.singular_value, s[:K], atol=1e-8)
        mutual = brute_force.couplings([A, M], K)["miscoupling"]
        for half, J, coupling in (("attention", A, mutual[0, 1]), ("mlp", M, mutual[1, 0])):
            matrix = U[:, :K].T @ J @ Vh[:K].T
            np.testing.assert_allclose(abs(at[f"{half}_matrix"]), abs(matrix), atol=1e-8)  # signs are open
            np.testing.assert_allclose(at[f"{half}_share"], matrix.diagonal().sum() / s[:K].sum(), atol=1e-8)
            np.testing.assert_allclose(at[f"{half}_gain"], (J**2).sum() ** 0.5 / len(J) ** 0.5, atol=1e-8)
            np.testing.assert_allclose(at[f"{half}_coupling"], coupling, atol=1e-8)
        if parallel:
            assert float(at.attention_share + at.mlp_share) == pytest.approx(1, abs=1e-8)


def test_blocks_that_do_not_show_their_halves_say_why():
    for name, reason in (
        ("nn.TransformerEncoder, pre-norm", "no module of it is named mlp or "),
        ("olmo2, post-norm", ""),
    ):
        _, _, ds = measured(name)
        reasons = json.loads(ds.attrs["without_halves"])
        assert ds.attention_gain.isnull().all() == bool(reason) and bool(reasons) == bool(reason)
        assert all(reason in given for given in reasons.values())


class Attention(torch.nn.Module):
    """Attention that also adds its input, so that holding its output holds the state."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=False)[0]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(), torch.nn.Linear(16, 16)

    def forward(self, x):
        x = self.attn(x)
        return x + self.mlp(x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_modules_whose_names_mislead_are_refused():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    ds = tracker.measure(Model().double().eval(), x, k=2, measures=MEASURES, dtype="float64", blocks="blocks")
    assert set(json.loads(ds.attrs["without_halves"])) == {"1", "2"} and ds.attention_gain.isnull().all()
    assert ds.mlp_matrix.isnull().all() and ds.miscoupling.notnull().all()
