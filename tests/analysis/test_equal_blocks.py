"""Equal and alike blocks: found, left out of means where they are one module, and named, against plain loops over pairs."""

import copy
import itertools

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import tracker
from tests.support.models import HEADS, VOCABULARY, WIDTH, neox, tokens
from tests.support.refused import refused
from tests.support.stores import stored
from tracker.analysis.curves import curves
from tracker.analysis.null_levels import null_level
from tracker.analysis.pairs import counted_pairs, independent_pairs
from tracker.analysis.reduction import read_miscouplings, reduced
from tracker.figures.selection import draw
from tracker.measures.equal_blocks import read_equal_blocks, shares_alike
from tracker.measures.registry import MISCOUPLINGS
from tracker.report.contents import contents
from tracker.report.write import write_report
from tracker.store import open_results

K = 4
ONE_IN_40 = "One in 40"


def layer(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, batch_first=True, norm_first=True, **options
    )


def measured(blocks, **options):
    return tracker.measure(nn.Sequential(*blocks).eval(), torch.randn(3, 6, WIDTH), k=K, **options)


@pytest.fixture(scope="module")
def looped():
    """Three modules that are called twice each, at two tokens of three samples."""
    torch.manual_seed(0)
    return measured([layer() for _ in range(3)] * 2, tokens=[0, -1])


COUNTED = [(l, m) for l, m in itertools.permutations(range(6), 2) if (l - m) % 3]


def test_pairs_of_one_module_are_left_out_of_means(looped):
    assert looped.attrs["equal_blocks"] == "one module: 1 4, 2 5, 3 6"
    assert_means(looped, COUNTED)
    torch.manual_seed(1)
    a, b = layer(), layer()
    neighbours = measured([a, a, b, a])
    assert neighbours.attrs["equal_blocks"] == "one module: 1 2 4"
    assert_means(neighbours, [(0, 2), (1, 2), (2, 0), (2, 1), (2, 3), (3, 2)])
    assert_means(measured([a, b, layer()]), list(itertools.permutations(range(3), 2)))


def assert_means(ds, counted):
    """Compare all means over pairs with plain loops, where these pairs with l != l' count."""
    L = ds.sizes["layer"]
    assert sorted(zip(*np.nonzero(counted_pairs(ds).values), strict=True)) == counted
    pairs = {
        "mean": list(itertools.product(range(L), range(L))),
        "mean_offdiag": counted,
        "mean_adjacent": [(l, m) for l, m in counted if abs(l - m) == 1],
    }
    points, at = curves(ds, MISCOUPLINGS), reduced(ds)
    for measure, (name, chosen) in itertools.product(MISCOUPLINGS, pairs.items()):
        by_prompt, level = (
            np.mean([of.sel(k=K).values[..., l, m] for l, m in chosen], 0, dtype=float)
            for of in (ds[measure], null_level(ds, measure))
        )
        expected = {
            measure: by_prompt.mean(),
            f"{measure}_null": level.mean(),
            f"{measure}_q25": np.quantile(by_prompt, 0.25),
            f"{measure}_coupling": (level - by_prompt).mean(),
        }
        for one in (points, at):
            found = one[list(expected)].sel(k=K, pairs=name)
            np.testing.assert_allclose(found.to_array(), [*expected.values()], rtol=1e-6, atol=1e-7)
        coupling = at[f"{measure}_coupling_by_prompt"].sel(k=K, pairs=name)
        np.testing.assert_allclose(coupling, (level - by_prompt).mean(1), rtol=1e-5, atol=1e-7)


def test_pairs_of_the_same_two_modules_are_one_pair_of_a_test(looped):
    departure = null_level(looped, "miscoupling") - looped.miscoupling
    departure = departure.mean(("prompt", "token")).sel(k=K)
    values = departure.values
    expected = []
    for a, b in itertools.combinations(range(3), 2):
        directions = [(l, m) for l, m in COUNTED if {l % 3, m % 3} == {a, b}]
        expected.append(np.mean([values[l, m] for l, m in directions]))
    found = independent_pairs(departure, looped)
    np.testing.assert_allclose(sorted(found[np.isfinite(found)]), sorted(expected), rtol=1e-5)


def test_the_summary_names_equal_blocks(looped):
    said = repr(tracker.summary(looped))
    assert "Some blocks are one module (1, 4; 2, 5; 3, 6)" in said and ONE_IN_40 not in said
    assert "All pairs of the same two modules are one pair of it." in said
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(layer(), 4, enable_nested_tensor=False).eval()
    ds = tracker.measure(encoder, torch.randn(3, 6, WIDTH), k=K)
    assert ds.attrs["equal_blocks"] == "alike weights (100%): 1 2 3 4"
    said = repr(tracker.summary(ds))
    assert "Blocks 1, 2, 3, 4 have alike weights, of 100% of their parameters" in said
    assert ONE_IN_40 not in said
    assert (counted_pairs(ds).values > 0).sum() == 12
    both = repr(tracker.summary({"looped": looped, "copies": ds}))
    assert "looped: Some blocks are" in both and "copies: Blocks 1, 2, 3, 4 have" in both
    assert ONE_IN_40 not in both and "Blocks with alike weights pass it untrained." in both
    own = measured([layer() for _ in range(3)])
    assert own.attrs["equal_blocks"] == "none" and ONE_IN_40 in repr(tracker.summary(own))


def test_where_all_blocks_are_one_module_the_pairs_are_shown_and_named():
    sizes = {"embedding_size": 16, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    sizes |= {"vocab_size": VOCABULARY, "num_attention_heads": HEADS, "num_hidden_layers": 4}
    network = transformers.AlbertModel(transformers.AlbertConfig(**sizes)).eval()
    layers = "encoder.albert_layer_groups"
    with refused(f"A list of one block .* is measured if it is named.\n.*\n  blocks='{layers}'"):
        tracker.measure(network, tokens(), k=K)
    ds = tracker.measure(network, tokens(), k=K, blocks=layers)
    assert ds.attrs["equal_blocks"] == "one module: 1 2 3 4"
    table = tracker.summary(ds)
    expected = ds.miscoupling.sel(k=K).where(ds.layer != ds.layer_other).mean()
    assert table.loc["miscoupling", "all pairs"].value == pytest.approx(float(expected), rel=1e-6)
    assert "All blocks are one module" in repr(table) and "A t test" not in repr(table)


def with_part_of(block: nn.Module, other: nn.Module) -> nn.Module:
    """Return a block that shares its MLP's first matrix, two fifths of its parameters or a little less, with another."""
    block.linear1.weight = other.linear1.weight
    return block


def changed(block: nn.Module, by: float) -> nn.Module:
    """Return a copy whose weights are moved by noise, relative to their size."""
    block = copy.deepcopy(block)
    with torch.no_grad():
        for weight in block.parameters():
            weight += by * weight.std() * torch.randn_like(weight)
    return block


def negated(block: nn.Module) -> nn.Module:
    block = copy.deepcopy(block)
    with torch.no_grad():
        for weight in block.parameters():
            weight.neg_()
    return block


def with_mean(block: nn.Module) -> nn.Module:
    """Add the same vector to all rows of a matrix, as training does."""
    with torch.no_grad():
        block.linear1.weight += torch.linspace(-1, 1, WIDTH)
    return block


def blocks_that_are_equal() -> dict[str, tuple[list[nn.Module], str]]:
    torch.manual_seed(0)
    a, b, c, d, again, tied = (layer() for _ in range(6))
    again.load_state_dict(a.state_dict())
    for part, shared in zip(tied.modules(), c.modules(), strict=True):
        part._parameters = shared._parameters
    return {
        "a module and its copy": ([a, b, again, a], "one module: 1 4; alike weights (100%): 1 3 4"),
        "a copy that has moved": ([a, b, changed(a, 1)], "alike weights (100%): 1 3"),
        "a copy that has moved far": ([a, b, changed(a, 30)], "none"),
        "opposite weights": ([a, negated(a), b], "none"),
        "tied weights": ([c, a, tied], "one module: 1 3"),
        "a common mean": ([with_mean(layer()) for _ in range(3)], "none"),
        "one matrix": ([a, b, with_part_of(d, a)], "alike weights (25%): 1 3"),
        "two groups": (
            [a, b, changed(a, 1), changed(b, 1)],
            "alike weights (100%): 1 3; alike weights (100%): 2 4",
        ),
    }


BLOCKS = blocks_that_are_equal()


@pytest.mark.parametrize("case", BLOCKS)
def test_which_blocks_are_equal(case):
    blocks, expected = BLOCKS[case]
    assert measured(blocks).attrs["equal_blocks"] == expected


def test_matrices_are_compared_in_all_their_rows():
    """Those of the second are by turns those of the first, their opposites, and its own."""
    torch.manual_seed(0)
    first, second = nn.Linear(64, 192), nn.Linear(64, 192)
    with torch.no_grad():
        second.weight[::3], second.weight[1::3] = first.weight[::3], -first.weight[1::3]
    assert shares_alike([first, second])[0, 1] == 0


def test_blocks_may_be_equal_at_the_first_step_alone(tmp_path):
    encoder = nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False)
    moved, x = changed(encoder, 30), torch.randn(3, 6, WIDTH)
    units = {0: tracker.measure(encoder, x, k=K), 10: tracker.measure(moved, x, k=K)}
    store = stored(tmp_path / "store", units)
    results = open_results(store)
    assert results["equal_blocks"].values.tolist() == ["alike weights (100%): 1 2 3", "none"]
    said = repr(tracker.summary(store))
    assert "At step 0: Blocks 1, 2, 3 have alike weights" in said and ONE_IN_40 not in said
    parts = repr(tracker.summary(results.assign_coords(step=[0.25, 0.5])))
    assert "At step 0.25: Blocks 1, 2, 3 have alike weights" in parts


def test_read_miscouplings_figures_and_the_page_leave_them_out(looped, tmp_path):
    measure = "offdiag_normalized"
    store = stored(tmp_path / "store", dict.fromkeys((0, 10, 20), looped))
    results = open_results(store)
    values = looped[measure].sel(k=K)
    above = (null_level(looped, measure).sel(k=K) - values).values
    coupling = np.mean([above[..., l, m] for l, m in COUNTED], 0)
    by_layer = [np.mean([above[..., l, m] for l, m in COUNTED if l == layer]) for layer in range(6)]
    read = read_miscouplings(store).sel(measure=measure, k=K, pairs="mean_offdiag", step=10)
    two = {"looped": results, "again": results}
    tables = {name: draw(name, two, K)[1] for name in ("1b", "1c", "9", "15")}
    tables = {name: table[table.result == "looped"] for name, table in tables.items()}
    for found, expected in (
        (read.null - read.miscoupling, coupling.mean(0)),
        (tables["9"].coupling, coupling.mean(1)),
        (tables["1b"].coupling, coupling.mean()),
        (tables["15"].coupling, by_layer),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    edges = tables["1c"].dropna()[["layer", "layer_other"]].drop_duplicates().values.tolist()
    assert edges == [[l + 1, m + 1] for l, m in COUNTED if l < m]
    l, m = contents(reduced(results))["most_coupled"][measure][K]
    assert (l - m) % 3


def test_what_earlier_versions_wrote_is_read():
    assert [group.layers for group in read_equal_blocks("equal weights: 1 2, 3 4")] == [
        [1, 2],
        [3, 4],
    ]
    assert read_equal_blocks("") == []


@pytest.mark.parametrize("inside", [False, True])
def test_one_block_is_measured_without_pairs(inside, recwarn, tmp_path):
    """All that needs no pairs, without an error or a warning of numpy's."""
    network = neox(num_hidden_layers=1) if inside else nn.Sequential(layer()).eval()
    inputs = tokens() if inside else torch.randn(3, 6, WIDTH)
    blocks = None if inside else ["0"]
    ds = tracker.measure(network, inputs, k=K, measures="all", blocks=blocks)
    assert ds.sizes["layer"] == 1 and float(ds.lss.median()) == pytest.approx(1)
    table = tracker.summary(ds)
    assert set(table.index.get_level_values("measure")) == {"lss", "expodistance", "alpha_mean"}
    assert "One block makes no pairs" in repr(table) and ONE_IN_40 not in repr(table)
    store = stored(tmp_path / "store", {0: ds, 10: ds})
    # The entropy is of logits
    for figure in ("1b", "1c", "30", "curves", "heatmap", *["26"] * inside):
        tracker.plot(store, figure)
    write_report([tmp_path / "store"], tmp_path / "page.html")
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
