"""Jacobians between tokens and their couplings against brute force; the other measures of `measures=` against definitions."""

import warnings

import numpy as np
import pytest
import torch

import tracker
from tests import brute_force
from tests.models import FAMILIES, build
from tests.test_brute_force import oracle
from tracker.arguments import Rows
from tracker.blocks import UsageError, find_blocks
from tracker.inputs import batches
from tracker.recording import record, undisturbed
from tracker.replica import Replica
from tracker.rows import Jacobians

CPU = torch.device("cpu")
CAUSAL = ("gpt_neox", "llama, grouped keys", "gemma2, soft cap", "gptj", "bloom")
BIDIRECTIONAL = ("timm vit", "bert", "nn.TransformerEncoder, post-norm, bidirectional")
MEASURES = ("miscoupling", "miscoupling_release", "offdiag", "offdiag_normalized")


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def between(name, pairs, dtype=torch.float64):
    """J_{t1 t2} of every block at (sample, t1, t2), and what brute force gives."""
    model, inputs, ds, expected = oracle(name, dtype)
    (batch,) = batches(model, inputs, None, None)
    sample, source, token = (torch.tensor(index) for index in zip(*pairs, strict=True))
    with undisturbed(CPU):
        replica = Replica(model, find_blocks(model), dtype, CPU)
        recording = record(replica, batch.arguments, batch.keywords)
        recording = recording.fold_final_norm() if ds.attrs["final_norm"] == "include" else recording
        jacobians = Jacobians(replica)
        found = [jacobians([(call, Rows(sample, token, source))])[0] for call in recording.calls]
    truth = [torch.stack([expected.jacobian(l, *pair).detach() for pair in pairs]) for l in range(len(found))]
    return found, truth


@pytest.mark.parametrize("name", [*CAUSAL, *BIDIRECTIONAL])
def test_jacobians_between_tokens(name):
    found, truth = between(name, [(0, 0, 3), (0, 1, 3), (1, 2, 3), (0, 3, 1), (1, 3, 0)])
    for (J, evidence), expected in zip(found, truth, strict=True):
        assert evidence.sliced is not FAMILIES[name].full
        torch.testing.assert_close(J, expected, rtol=0, atol=1e-10 * max(1, float(expected.abs().max())))
        if name in CAUSAL:
            assert not J[3:].any() and J[:3].any()
        else:
            assert J[3:].any()


def test_jacobians_between_tokens_in_float32():
    found, truth = between("gpt_neox", [(0, 0, 3), (1, 2, 3)], torch.float32)
    for (J, _), expected in zip(found, truth, strict=True):
        torch.testing.assert_close(J, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["gpt_neox", "llama, grouped keys", "timm vit"])
def test_token_wise_couplings_against_brute_force(name):
    model, inputs, ds, expected = oracle(name, torch.float64)
    K, tokens = 4, [0, 1, 3]
    found = tracker.measure(
        model, inputs, k=[2, K], dtype=torch.float64, measures=["tokenwise", "matrices", "coupling"], pair_tokens=tokens
    )
    assert found.pair_position.values.tolist() == [tokens, tokens]
    for b in range(2):
        for l in range(len(expected.blocks)):
            by_kind = {
                "self": [(t, t) for t in tokens],
                "fixed_input": [(tokens[0], t) for t in tokens],
                "fixed_output": [(t, tokens[-1]) for t in tokens],
            }
            for kind, pairs in by_kind.items():
                Js = [expected.jacobian(l, b, *pair).detach() for pair in pairs]
                for k in (2, K):
                    for measure, values in brute_force.couplings(Js, k).items():
                        seen = found[f"{kind}_{measure}"].isel(prompt=b, layer=l).sel(k=k).values
                        scale = 1 if measure != "offdiag" else max(1, float(values.max()))
                        np.testing.assert_allclose(seen, values, rtol=0, atol=1e-8 * scale)
                A = found[f"{kind}_matrix"].isel(prompt=b, layer=l).values
                _, s, _ = torch.linalg.svd(Js[0])
                np.testing.assert_allclose(np.diag(A[0, 0]), s[:2], rtol=1e-9)
                off = A[0, 1] - np.diag(np.diag(A[0, 1]))
                np.testing.assert_allclose(
                    np.linalg.norm(off), found[f"{kind}_offdiag"].isel(prompt=b, layer=l, k=0).values[0, 1], rtol=1e-9
                )


def test_certificates_and_counts_of_token_wise_couplings():
    model, inputs = build("gpt_neox")
    found = tracker.measure(model, inputs, k=4, measures=["tokenwise", "trajectory"], pair_tokens=np.int64(3))
    assert found.pair_position.values.tolist() == [[0, 3, 6]] * 2
    assert found.fixed_output_complete.all() and float(found.self_residual.max()) < 1e-5
    assert int(found.undefined.sel(quantity="self_miscoupling")) == 0
    alone = tracker.measure(model, inputs[:, :1], k=4, measures="tokenwise")  # one token: compared with itself
    assert float(abs(alone.self_offdiag).max()) < 1e-5


def test_shorter_prompts_lack_pairs():
    model, inputs = build("gpt_neox")
    mask = torch.ones_like(inputs)
    mask[1, 3:] = 0
    found = tracker.measure(model, {"input_ids": inputs, "attention_mask": mask}, k=4, measures="all", pair_tokens=5)
    assert found.pair_position[1].values[:3].tolist() == [0, 1, 2] and found.pair_position[1, 3:].isnull().all()
    assert found.self_offdiag[1, ..., 3:, :].isnull().all() and found.self_offdiag[1, ..., :3, :3].notnull().all()
    assert int(found.undefined.sum()) == 0 or set(found.undefined.quantity[found.undefined > 0].values) <= {
        "expodistance",
        "pca",
    }


def test_null_levels_stand_beside_token_wise_couplings():
    model, inputs = build("gpt_neox")
    found = tracker.measure(model, inputs, k=4, measures="tokenwise", pair_tokens=3)
    assert found.self_offdiag_normalized_null.dims == ("prompt", "k", "layer", "pair_token")
    np.testing.assert_allclose(found.self_offdiag_normalized_null, np.sqrt(3 / 4), rtol=1e-6)


def test_sides_swapped():
    model, inputs, _, expected = oracle("gpt_neox", torch.float64)
    K, t = 4, expected.inputs[0].shape[1] - 1
    found = tracker.measure(model, inputs, k=K, dtype=torch.float64, measures=["coupling", "vju", "matrices"])
    Js = [expected.jacobian(l, 0, t, t).detach() for l in range(len(expected.blocks))]
    for l, J in enumerate(Js):
        s = torch.linalg.svdvals(J)[:K]
        for m, other in enumerate(Js):
            U, _, Vh = torch.linalg.svd(other)
            A = Vh[:K] @ J @ U[:, :K]
            value = (A - torch.diag(s)).norm() / s.norm()
            np.testing.assert_allclose(found.miscoupling_vju[0, 0, 0, l, m], value, atol=1e-8)
            straight = (U[:, :K].T @ J @ Vh[:K].T).abs()
            np.testing.assert_allclose(abs(found.matrix[0, 0, l, m]), straight, atol=1e-8)


def test_logit_entropy():
    model, inputs, _, expected = oracle("gpt_neox", torch.float64)
    found = tracker.measure(model, inputs, dtype=torch.float64, measures="entropy")
    with torch.no_grad():
        p = model(inputs).logits.softmax(-1)
        np.testing.assert_allclose(found.entropy[:, -1], -(p * p.log()).sum(-1), rtol=1e-9)
        p = model.lm_head(model.gpt_neox.final_layer_norm(expected.inputs[1])).softmax(-1)
        np.testing.assert_allclose(found.entropy[:, 1], -(p * p.log()).sum(-1), rtol=1e-9)


def test_entropy_needs_an_unembedding():
    model, inputs = build("timm vit")
    with pytest.raises(UsageError, match="no unembedding"):
        tracker.measure(model, inputs, measures="entropy")
    assert "entropy" not in tracker.measure(model, inputs, measures="all", k=4)


def test_principal_plane():
    model, inputs, _, expected = oracle("gpt_neox", torch.float64)
    found = tracker.measure(model, inputs, dtype=torch.float64, measures="pca")
    X = expected.states().detach()
    from sklearn.decomposition import PCA

    for b in range(len(inputs)):
        pca = PCA(2).fit(X[-1, b])
        for depth in range(len(X)):
            seen = found.pca[b, depth].values
            np.testing.assert_allclose(abs(seen), abs(pca.transform(X[depth, b].numpy())), atol=1e-9)


def test_noise_turns_states_and_none_does_not():
    model, inputs, _, expected = oracle("gpt_neox", torch.float64)
    found = tracker.measure(model, inputs, dtype=torch.float64, measures="noise").noise_similarity
    assert found.dims == ("prompt", "noise", "depth", "position") and found.noise.values.tolist() == sorted(found.noise)
    at_input = found.sel(depth=0).mean(("prompt", "position"))
    np.testing.assert_allclose(at_input, 1 / np.sqrt(1 + found.noise**2), atol=0.05)
    assert (found.diff("noise").mean(("prompt", "position")) < 0).all()
    same = tracker.measure(model, inputs, dtype=torch.float64, measures="noise").noise_similarity
    np.testing.assert_array_equal(same, found)
    assert not np.allclose(found[0, :, 0], found[1, :, 0])  # another draw for each prompt
    from tracker.readings import noise_similarity

    (batch,) = batches(model, inputs, None, None)
    with undisturbed(CPU):
        replica = Replica(model, find_blocks(model), torch.float64, CPU)
        similarity = noise_similarity(replica, record(replica, batch.arguments, batch.keywords), (0.0,))
    np.testing.assert_allclose(similarity, 1, atol=1e-12)


def test_long_prompts_are_read_in_parts():
    model, inputs = build("gpt_neox")
    whole, parts = (
        tracker.measure(model, inputs, measures=["trajectory", "entropy", "pca", "noise"], memory_budget=budget)
        for budget in (1 << 30, 1 << 10)
    )
    for name in ("lss", "entropy", "pca", "noise_similarity", "lss_window"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measures": "couplings"}, "choose from all, coupling"),
        ({"measures": ["vju"]}, "add 'coupling'"),
        ({"measures": "tokenwise", "pair_tokens": 1}, "at least 2"),
        ({"measures": "tokenwise", "pair_tokens": [0, 99]}, "out of range"),
        ({"measures": "tokenwise", "pair_tokens": "all"}, "pair_tokens='all'"),
    ],
)
def test_bad_choices(options, message):
    model, inputs = build("gpt_neox")
    with pytest.raises(UsageError, match=message):
        tracker.measure(model, inputs, **options)
