"""How many Jacobians are decomposed together on an accelerator, and that more rows cost no more launches and copies."""

import numpy as np
import pytest

import tracker
from tests.support.models import Size, build
from tests.support.rounding import of_miscouplings
from tracker.linalg import svd

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, DEPTH = 192, 3


def measured(device, **options):
    """Measure both samples' last rows of an untrained model on a device."""
    model, given = build("gpt_neox", Size(width=WIDTH, depth=DEPTH))
    options = {
        "k": (3, 6),
        "tokens": "last",
        "measures": "coupling",
        "final_norm": "exclude",
    } | options
    return tracker.measure(model.to(device), given, **options)


@pytest.fixture
def together(monkeypatch) -> list[int]:
    """Numbers of Jacobians decomposed together."""
    sizes = []
    full = svd.in_full
    monkeypatch.setattr(svd, "in_full", lambda J, K: sizes.append(len(J)) or full(J, K))
    return sizes


@pytest.mark.slow
def test_jacobians_of_all_layers_are_decomposed_together(pretend, together):
    samples = 2
    roomy = measured(pretend.device, svd="full")
    assert together == [samples * DEPTH]
    together.clear()
    # Its half just holds the Jacobians; a quarter remains for the arrays
    budget = 2 * samples * DEPTH * WIDTH**2 * 4
    tight = measured(pretend.device, svd="full", memory_budget=budget)
    assert max(together) < samples * DEPTH and sum(together) == samples * DEPTH
    np.testing.assert_allclose(
        tight.miscoupling, roomy.miscoupling, rtol=0, atol=of_miscouplings(roomy)
    )
    together.clear()
    measured("cpu", svd="full")
    assert together == [samples] * DEPTH, "layers go to separate cores"


@pytest.mark.slow
def test_links_of_a_block_are_decomposed_together(pretend, together):
    options = {"svd": "full", "measures": "tokenwise", "pair_tokens": 2, "pair_layers": 1}
    there = measured(pretend.device, **options)
    assert max(together) == 2 * 3, "J_11, J_12 and J_22 of two samples"
    here = measured("cpu", **options)
    np.testing.assert_allclose(there.self_miscoupling, here.self_miscoupling, atol=1e-4)
