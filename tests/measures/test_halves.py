"""Attention and MLP apart: their Jacobians and measures, against brute force with one module's output replaced by a constant."""

import json

import pytest
import torch
import xarray as xr

import tracker
from tests.jacobians.test_rows import Stack
from tests.models import Size, build

pytestmark = pytest.mark.filterwarnings("ignore")
MEASURES = ["coupling", "halves"]


def measured(name, **options):
    torch.manual_seed(0)
    model, inputs = build(name, Size(depth=2))
    model = model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    options = {"k": 4, "measures": MEASURES, "dtype": "float64", "tokens": "last"} | options
    return tracker.measure(model, inputs, **options)


def test_blocks_that_do_not_show_their_halves_say_why():
    for name, reason in (
        ("nn.TransformerEncoder, pre-norm", "no module of it is named mlp or "),
        ("olmo2, post-norm", ""),
    ):
        ds = measured(name)
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


def test_modules_whose_names_mislead_are_refused():
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    model = Stack([Block(), Block()]).double().eval()
    ds = tracker.measure(model, x, k=2, measures=MEASURES, dtype="float64", blocks="blocks")
    assert (
        set(json.loads(ds.attrs["without_halves"])) == {"1", "2"}
        and ds.attention_gain.isnull().all()
    )
    assert ds.mlp_matrix.isnull().all() and ds.miscoupling.notnull().all()


def test_a_single_direction():
    one, two = measured("gpt_neox", k=1), measured("gpt_neox", k=2)
    for half in ("attention_matrix", "mlp_matrix"):
        xr.testing.assert_allclose(one[half], two[half].isel(row=[0], column=[0]))
