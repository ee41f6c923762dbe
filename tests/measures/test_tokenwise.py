"""Jacobians between tokens and their couplings against brute force; the other measures of `measures=` against definitions."""

import numpy as np
import pytest
import torch

import tracker
from tests.jacobians.measured import jacobians_at
from tests.jacobians.test_brute_force import oracle
from tests.models import FAMILIES, Letters, Size, build, neox, tokens
from tests.rounding import rounding
from tracker.analysis.curves import CURVES, curves
from tracker.common.errors import UsageError
from tracker.jacobians.rows import Jacobians
from tracker.measures import tokenwise

pytestmark = pytest.mark.filterwarnings("ignore")
CAUSAL = ("gpt_neox", "llama, grouped keys", "gemma2, soft cap", "gptj", "bloom")
BIDIRECTIONAL = ("timm vit", "bert", "nn.TransformerEncoder, post-norm, bidirectional")


def between(name, pairs, dtype=torch.float64):
    """Return J_{t1 t2} of every block at (sample, t1, t2), measured and by brute force."""
    model, inputs, ds, expected = oracle(name, dtype)
    found = jacobians_at(model, inputs, pairs, dtype, final_norm=ds.attrs["final_norm"] == "include")
    truth = [torch.stack([expected.jacobian(l, *pair).detach() for pair in pairs]) for l in range(len(found))]
    return found, truth


@pytest.mark.parametrize("name", [*CAUSAL, *BIDIRECTIONAL])
def test_jacobians_between_tokens(name):
    found, truth = between(name, [(0, 0, 3), (0, 1, 3), (1, 2, 3), (0, 3, 1), (1, 3, 0)])
    for (J, checks), expected in zip(found, truth, strict=True):
        assert checks.sliced is not FAMILIES[name].full
        torch.testing.assert_close(J, expected, rtol=0, atol=1e-10 * max(1, float(expected.abs().max())))
        if name in CAUSAL:
            assert not J[3:].any() and J[:3].any()
        else:
            assert J[3:].any()


def test_jacobians_between_tokens_in_float32():
    found, truth = between("gpt_neox", [(0, 0, 3), (1, 2, 3)], torch.float32)
    for (J, _), expected in zip(found, truth, strict=True):
        torch.testing.assert_close(J, expected, rtol=0, atol=rounding(torch.float32) * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("apart", "measured"), [(1, {1, 2, 3}), (0, {1, 2, 3}), (-2, {1, 3})])
def test_no_jacobian_is_computed_twice(apart, measured, monkeypatch):
    model, inputs = build("gpt_neox", Size(16))
    asked, at_once = [], []
    find = Jacobians.__call__

    def counting(self, selections):
        for call, rows in selections:
            source = rows.token if rows.source is None else rows.source
            asked.extend((call.layer, *link) for link in zip(source.tolist(), rows.token.tolist(), strict=True))
            at_once.append(len(rows.token))
        return find(self, selections)

    monkeypatch.setattr(Jacobians, "__call__", counting)
    options = {
        "k": 4,
        "measures": "tokenwise",
        "pair_tokens": [0, 2, 3, 5],
        "pair_layers": apart,
        "dtype": torch.float64,
    }
    whole = tracker.measure(model, inputs[:1], **options)
    assert len(asked) == len(set(asked)) == len(measured) * (3 * 4 - 3) and {l for l, *_ in asked} == measured
    at_once.clear()
    scarce = tracker.measure(model, inputs[:1], **options, memory_budget=1 << 10)
    assert set(at_once) == {1} and len(asked) == 2 * len(set(asked))
    for name in ("self_miscoupling", "fixed_input_offdiag", "fixed_output_miscoupling", "self_overlap_squares"):
        np.testing.assert_allclose(scarce[name], whole[name], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_untrained_blocks_are_unrelated_and_a_block_is_related_to_itself():
    """The paper's claim about untrained models is of two blocks; two tokens in one block share its weights."""
    torch.manual_seed(0)
    model, inputs = neox(size=Size(96, 5)), tokens(4)

    def reading(pair_layers):
        unit = tracker.measure(model, inputs, k=10, measures="tokenwise", pair_tokens=4, pair_layers=pair_layers)
        points = curves(unit, CURVES).isel(k=0)
        return float(points.self_miscoupling), float(points.self_miscoupling_null)

    between, level = reading(1)
    assert between == pytest.approx(level, abs=0.02)
    within, level = reading(0)
    assert within < 0.5 * level


def test_one_block_has_no_other():
    model = neox(size=Size(32, 1))
    assert "self_offdiag" not in tracker.measure(model, tokens(1), k=4, measures="all")
    with pytest.raises(UsageError, match="pair_layers=1, but 1 block is measured.* pair_layers=0"):
        tracker.measure(model, tokens(1), k=4, measures="tokenwise")
    found = tracker.measure(model, tokens(1), k=4, measures="all,tokenwise", pair_layers=0)
    assert found.self_offdiag.notnull().all() and found.pair_layer_other.values.tolist() == [1]


def test_certificates_and_counts_of_token_wise_couplings():
    model, inputs = build("gpt_neox")
    found = tracker.measure(model, inputs, k=4, measures=["tokenwise", "trajectory"], pair_tokens=np.int64(3))
    assert found.pair_position.values.tolist() == [[0, 3, 6]] * 2
    assert found.diagnostics_fixed_output_complete.all() and float(found.diagnostics_self_residual.max()) < 1e-5
    assert int(found.diagnostics_undefined.sel(quantity="self_miscoupling")) == 0
    # one token, one block: compared with itself
    alone = tracker.measure(model, inputs[:, :1], k=4, measures="tokenwise", pair_layers=0, dtype=torch.float64)
    assert float(abs(alone.self_offdiag).max()) < rounding(torch.float64) * float(alone.self_singular_value.max())


def test_shorter_prompts_lack_pairs():
    model, inputs = build("gpt_neox")
    mask = torch.ones_like(inputs)
    mask[1, 3:] = 0
    found = tracker.measure(
        model, {"input_ids": inputs, "attention_mask": mask}, k=4, measures="all,tokenwise", pair_tokens=5
    )
    assert found.pair_position[1].values[:3].tolist() == [0, 1, 2] and found.pair_position[1, 3:].isnull().all()
    compared = found.self_offdiag[1].sel(layer=[1, 2])
    assert compared[..., 3:, :].isnull().all() and compared[..., :3, :3].notnull().all()
    assert int(found.diagnostics_undefined.sum()) == 0 or set(
        found.diagnostics_undefined.quantity[found.diagnostics_undefined > 0].values
    ) <= {
        "expodistance",
        "pca",
    }


@pytest.mark.slow
def test_prompts_pass_through_a_block_together_and_give_what_each_gives_alone(monkeypatch):
    width = 16
    model, _ = build("gpt_neox", Size(width))
    prompts = ["abcdefg", "bcd", "gfedcba", "hijklmno"]  # of 4, 3, 4 and 4 compared tokens
    options = {"k": [2, 4], "measures": ["tokenwise", "matrices", "coupling"], "pair_tokens": 4, "dtype": torch.float64}
    options |= {"tokenizer": Letters()}
    alone = [tracker.measure(model, [prompt], **options) for prompt in prompts]
    # Residuals are rounding errors.
    compared = [measure.name for measure in tokenwise.DECLARED if "residual" not in measure.name]
    at_once, find = [], Jacobians.__call__

    def counting(self, selections):
        at_once.append(sum(len(rows) for _, rows in selections))
        return find(self, selections)

    monkeypatch.setattr(Jacobians, "__call__", counting)
    held = 2 * 8 * width**2 * (3 * 4 - 3)  # bytes: half of them for the links of one sample in a block
    for budget, most in ((1 << 30, 3 * 5), (2 * held, 2 * 5), (held // 2, 4)):
        at_once.clear()
        together = tracker.measure(model, prompts, **options, memory_budget=budget)
        assert max(at_once) == most
        for b, expected in enumerate(alone):
            T = expected.sizes["pair_token"]
            seen = together.isel(prompt=[b], pair_token=slice(T), pair_token_other=slice(T))
            for name in compared:
                # Signs of singular vectors are free, so those of the matrices' entries are.
                values = (abs(ds[name].astype(float)) for ds in (seen, expected))
                np.testing.assert_allclose(*values, atol=1e-8, err_msg=name)


def test_entropy_needs_an_unembedding():
    model, inputs = build("timm vit")
    with pytest.raises(UsageError, match="no unembedding"):
        tracker.measure(model, inputs, measures="entropy")
    assert "entropy" not in tracker.measure(model, inputs, measures="all", k=4)


def test_long_prompts_are_read_in_parts():
    model, inputs = build("gpt_neox")
    whole, parts = (
        tracker.measure(
            model, inputs, measures=["trajectory", "entropy", "pca", "noise"], memory_budget=budget, dtype=torch.float64
        )
        for budget in (1 << 30, 1 << 10)
    )
    for name in ("lss", "entropy", "pca", "noise_similarity", "lss_window"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measures": "tokenwise", "pair_tokens": [0, 99]}, "out of range"),
        ({"measures": "tokenwise", "pair_tokens": "all"}, "pair_tokens='all'"),
        ({"measures": "tokenwise", "pair_layers": 3}, "pair_layers=3, but 3 blocks are measured"),
        ({"measures": "all,tokenwise", "pair_layers": -3}, "pair_layers=-3, but 3 blocks are measured"),
        ({"pair_layers": "next"}, "pair_layers='next'; give one whole number"),
    ],
)
def test_bad_choices(options, message):
    model, inputs = build("gpt_neox")
    with pytest.raises(UsageError, match=message):
        tracker.measure(model, inputs, **options)
