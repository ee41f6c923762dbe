"""Jacobians on single rows: planted faults are caught, unsliceable blocks are still right, weights are the current ones."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import tracker
import tracker.jacobians.row_attention
import tracker.jacobians.rows
from tests.jacobians.measured import detached, jacobians_at
from tests.models import WIDTH, build, images, timm_vit
from tracker.common.errors import Note
from tracker.linalg.precision import switches


class Attention(nn.Module):
    """Holds the word that `find_blocks` looks for; rows do not mix."""


class Mixing(nn.Module):
    """x_t + M mean_s(x_s): row t of the output depends on row s of the input through M / n exactly."""

    def __init__(self, M):
        super().__init__()
        self.attention, self.M = Attention(), nn.Parameter(M)

    def forward(self, x):
        return x + (x.mean(1, keepdim=True) @ self.M.T).tanh()


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def measured(model):
    return tracker.measure(model, random(1, 4, 8), k=3, dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rows_that_mix_outside_attention_are_measured_over_the_full_sequence():
    M = [random(8, 8, seed=i) for i in range(3)]
    model, x = Stack(map(Mixing, M)), random(1, 5, 8)
    with pytest.warns(
        Note,
        match="as exact as single rows and with up to 5 times the operations .*by code of its own",
    ):
        ds = tracker.measure(model, x, k=8, dtype=torch.float64)
    assert not ds.diagnostics_sliced.any() and "by code of its own" in ds.attrs["fallbacks"]
    slope = 1 - ((x.mean(1) @ M[0].T).tanh() ** 2)[0]
    # M / n: a row's own share of the mean
    expected = torch.linalg.svdvals(slope[:, None] * M[0] / 5)
    np.testing.assert_allclose(ds.singular_value[0, 0, 0], expected)


@pytest.mark.parametrize("path", tracker.jacobians.rows.PATHS)
@pytest.mark.parametrize("positions", [[-1], [0, -1], "all"], ids=str)
@pytest.mark.parametrize("planted", ["key", "value"])
def test_a_detached_key_or_value_is_caught(monkeypatch, planted, positions, path):
    """Planted in the slicing itself: outputs agree to the last bit, only the derivative is wrong."""
    faulty = {path: detached(tracker.jacobians.rows.PATHS[path], planted)}
    model, inputs = build("gpt_neox")
    honest = tracker.measure(model, inputs, k=4, tokens=positions, dtype=torch.float64)
    assert honest.diagnostics_sliced.all()
    monkeypatch.setattr(tracker.jacobians.rows, "PATHS", faulty)
    with pytest.warns(UserWarning, match="derivative at single rows is not"):
        ds = tracker.measure(model, inputs, k=4, tokens=positions, dtype=torch.float64)
    assert ds.attrs["independent_checks"] == "{}"
    assert not ds.diagnostics_sliced.any() and float(ds.diagnostics_value_error.max()) < 1e-9
    # And the full sequence gives the right answer all the same.
    np.testing.assert_allclose(ds.miscoupling, honest.miscoupling, atol=1e-8, rtol=0)


@pytest.mark.parametrize("fault", ["value", "derivative"])
def test_where_the_formula_fails_its_check_the_models_own_attention_serves(monkeypatch, fault):
    def wrong(expansion, *live):
        out = honest(expansion, *live)
        return 1.01 * out if fault == "value" else out.detach() + 1.01 * (out - out.detach())

    model, inputs = build("gpt_neox")
    rows = [(b, inputs.shape[1] - 1) for b in range(len(inputs))]
    seen = jacobians_at(model, inputs, rows)
    honest = tracker.jacobians.row_attention.Expansion.__call__
    monkeypatch.setattr(tracker.jacobians.row_attention.Expansion, "__call__", wrong)
    redone = jacobians_at(model, inputs, rows)
    for (J, checks), (other, other_checks) in zip(seen, redone, strict=True):
        assert (checks.path, other_checks.path) == ("formula", "own code")
        torch.testing.assert_close(J, other, atol=1e-10, rtol=0)


def test_two_blocks_named_as_one_are_caught_by_the_derivative_check():
    """Rows frozen at the second attention did depend on the row in question, through the first."""
    model = timm_vit().double().eval()
    pairs = nn.Sequential(
        *(nn.Sequential(a, b) for a, b in (list(model.blocks)[:2], [model.blocks[2], timm_block()]))
    )
    model.blocks = pairs.double()
    with pytest.warns(UserWarning, match="failed its derivative check"):
        ds = tracker.measure(
            model, images(1).double(), blocks=list(model.blocks), k=4, dtype=torch.float64
        )
    assert not ds.diagnostics_sliced.any() and float(ds.diagnostics_value_error.max()) < 1e-9


def timm_block():
    torch.manual_seed(5)
    return timm.models.vision_transformer.Block(WIDTH, 4)


class InPlace(nn.Module):
    def __init__(self, J):
        super().__init__()
        self.attention, self.J = Attention(), nn.Parameter(J)

    def forward(self, x):
        x += x @ self.J.T
        return x


def test_blocks_that_work_in_place():
    J = [random(8, 8, seed=i) / 3 for i in range(2)]
    ds = measured(Stack(map(InPlace, J)))
    for l in range(2):
        np.testing.assert_allclose(ds.singular_value[0, 0, l], torch.linalg.svdvals(J[l])[:3])


def test_a_key_that_the_block_itself_detaches_is_its_true_derivative():
    """What the block's own code detaches has no derivative; sliced and full agree, and nothing is flagged."""

    class DetachedKey(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.qkv = Attention(), nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
            return x + F.scaled_dot_product_attention(q, k.detach(), v)[:, 0]

    torch.manual_seed(0)
    assert tracker.measure(
        Stack([DetachedKey(), DetachedKey()]), random(1, 6, 8), k=3
    ).diagnostics_sliced.all()


class Inner(nn.Module):
    """Two attentions, in parallel or in series: the same class and settings, another function."""

    def __init__(self, series):
        super().__init__()
        self.qkv, self.flags = nn.Linear(8, 24), [series]
        self.attention = Attention()

    def attend(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v)[:, 0]

    def forward(self, x):
        first = self.attend(x)
        return x + first + self.attend(x + first if self.flags[0] else x)


def test_a_check_of_one_block_is_not_used_for_another():
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="failed its derivative check"):
        ds = tracker.measure(
            Stack([Inner(False), Inner(True)]).double(), random(1, 6, 8), k=3, dtype=torch.float64
        )
    assert ds.diagnostics_sliced.values[0, 0].tolist() == [True, False]


@pytest.mark.parametrize("init", [1e-4, 1e-6, 1e-8])
def test_small_residual_updates_keep_their_digits(init):
    """LayerScale at its start: in float32, x + f leaves few digits of f; such a Jacobian is found in float64."""
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=WIDTH,
        depth=3,
        num_heads=4,
        init_values=init,
    )
    seen, exact = (
        tracker.measure(model, images(), k=4, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert seen.diagnostics_sliced.all()
    relative = abs(seen.singular_value / exact.singular_value - 1)
    assert float(relative.max()) < 1e-4
    assert float(abs(seen.miscoupling - exact.miscoupling).max()) < 1e-3


class Linear(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.attention, self.layer = Attention(), layer

    def forward(self, x):
        return x + self.layer(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ["weight_norm", "prune", "parametrized"])
def test_weights_computed_by_hooks_are_the_current_ones(how):
    from torch.nn.utils import parametrizations, prune, weight_norm

    torch.manual_seed(0)
    layer = nn.Linear(8, 8).double()
    if how == "weight_norm":
        weight_norm(layer)
    elif how == "prune":
        prune.random_unstructured(layer, "weight", 0.3)
    else:
        parametrizations.weight_norm(layer)
    model = Stack([Linear(layer), Linear(nn.Linear(8, 8).double())])
    model(random(1, 4, 8))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)
    ds = measured(model)
    model(random(1, 4, 8))  # now the model's own hooks have run as well
    np.testing.assert_allclose(
        ds.singular_value[0, 0, 0], torch.linalg.svdvals(layer.weight).detach()[:3]
    )


def test_methods_put_on_an_instance():
    from types import MethodType

    model = Stack([Linear(nn.Linear(8, 8).double()) for _ in range(2)])
    plain = measured(model)
    layer = model.blocks[0].layer
    layer.forward = MethodType(lambda self, x: 3 * F.linear(x, self.weight, self.bias), layer)
    patched = measured(model)
    np.testing.assert_allclose(patched.singular_value[0, 0, 0], 3 * plain.singular_value[0, 0, 0])
    layer.forward = lambda x: F.linear(x, 4 * layer.weight, layer.bias)
    patched = measured(model)
    np.testing.assert_allclose(patched.singular_value[0, 0, 0], 4 * plain.singular_value[0, 0, 0])


def test_a_row_of_zeros_is_no_fault():
    model, inputs = build("llama, grouped keys")
    with torch.no_grad():
        model.model.embed_tokens.weight[int(inputs[0, 0])] = 0
    assert tracker.measure(model, inputs, k=4, tokens="all").diagnostics_sliced.all()


def global_state() -> list:
    """What a training that goes on after a measurement would notice."""
    kernels = torch.backends.cuda
    return [
        F.scaled_dot_product_attention,
        torch.backends.mha.get_fastpath_enabled(),
        [
            kernels.math_sdp_enabled(),
            kernels.flash_sdp_enabled(),
            kernels.mem_efficient_sdp_enabled(),
        ],
        [switch.fp32_precision for switch in switches()],
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.slow
def test_threads_measure_and_leave_the_process_as_it_was():
    from concurrent.futures import ThreadPoolExecutor

    model, inputs = build("timm vit")
    alone = tracker.measure(model, inputs, k=4)
    before = global_state()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: tracker.measure(model, inputs, k=4), range(8)))
    assert global_state() == before
    for result in results:
        assert result.diagnostics_sliced.all()
        np.testing.assert_allclose(result.miscoupling, alone.miscoupling, rtol=1.3e-6, atol=1e-5)
