"""Models that draw random numbers outside their blocks: every pass over the same inputs draws the same ones."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import tracker
from tests.support.draws import normal, seeded
from tests.support.home_made import WIDTH, Flat
from tests.support.refused import refused
from tests.support.units import assert_same

DEPTH, PROBE = 3, normal(3, 12, WIDTH)


SOURCES = {  # so many numbers, for a model
    "torch": lambda model, n: torch.rand(n),
    "Python": lambda model, n: [random.random() for _ in range(n)],
    "NumPy": lambda model, n: np.random.rand(n),
    "a torch.Generator of the model": lambda model, n: torch.rand(n, generator=model.generator),
    "a NumPy generator of the model": lambda model, n: model.rng.random(n),
    "a random.Random of the model": lambda model, n: [model.python[0].random() for _ in range(n)],
}


class Masked(nn.Module):
    """A masked autoencoder's encoder: it keeps a random third of the tokens of each sample."""

    def __init__(self, source="torch"):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Flat(causal=False) for _ in range(DEPTH))
        self.source, self.generator = source, seeded(5)
        self.rng, self.python = np.random.default_rng(5), [random.Random(5)]

    def uniform(self, *shape):
        drawn = SOURCES[self.source](self, int(np.prod(shape)))
        return torch.as_tensor(drawn).view(shape)

    def forward(self, x):
        keep = self.uniform(*x.shape[:2]).argsort(1)[:, : x.shape[1] // 3]
        x = x.gather(1, keep[..., None].expand(-1, -1, WIDTH))
        for block in self.blocks:
            x = block(x)
        return x


def measured(model, inputs=PROBE, **options):
    return tracker.measure(
        model, inputs, **{"k": 4, "dtype": torch.float64, "tokens": "last"} | options
    )


@pytest.mark.parametrize("source", SOURCES)
def test_what_was_drawn_before_changes_nothing(source):
    model = Masked(source)

    def generators():
        states = [torch.get_rng_state(), model.generator.get_state()]
        return [state.tolist() for state in states] + [
            str(state)
            for state in (
                np.random.get_state(),
                model.rng.bit_generator.state,
                model.python[0].getstate(),
            )
        ]

    first = measured(model)
    model.uniform(2, 3)
    before = generators()
    again = measured(model)
    assert generators() == before
    assert_same(first, again, ("lss", "miscoupling", "random_seed"))
    assert first.attrs["random_draws"] == 1 and len(set(first.random_seed.values)) == len(PROBE)


def test_the_states_are_those_of_the_seed_that_the_dataset_states():
    model, last = Masked().double(), []
    ds = measured(model, measures="trajectory")
    for b, seed in enumerate(ds.random_seed.values):
        torch.manual_seed(int(seed))
        with torch.no_grad():
            last.append(float(model(PROBE[b : b + 1].double())[0, -1].norm()))
    np.testing.assert_allclose(ds.norm.isel(position=-1, depth=-1), last, rtol=1e-9)


@pytest.mark.parametrize("probe", [PROBE, {"x": PROBE}])
def test_a_sample_draws_the_same_whatever_is_measured_beside_it(probe):
    """As when ranks share the samples of a probe."""
    model, together = Masked(), measured(Masked(), probe)
    for part in (slice(0, None, 2), slice(1, None, 2)):
        own = {"x": PROBE[part]} if isinstance(probe, dict) else PROBE[part]
        apart = measured(model, own)
        for name in ("lss", "miscoupling", "random_seed"):
            np.testing.assert_allclose(apart[name], together[name][part], rtol=0, atol=1e-9)


def test_a_model_without_random_numbers_says_so():
    ds = measured(nn.Sequential(*(Flat() for _ in range(DEPTH))))
    assert ds.attrs["random_draws"] == 0 and "random_seed" not in ds.coords


class Dropped(Flat):
    """Returns its input in 5 % of its calls, or draws for nothing."""

    def __init__(self, source, used=True):
        super().__init__(causal=False)
        drawing = Masked(source)
        self.draw, self.used = lambda: float(Masked.uniform(drawing)), used

    def forward(self, x):
        dropped = self.draw() < 0.05 and self.used
        return x if dropped else super().forward(x)


SPANS = [(f"input of blocks.{l}", f"output of blocks.{l}") for l in range(DEPTH)]
DRAWN = [("blocks", source) for source in SOURCES] + [(SPANS, "torch")]


@pytest.mark.parametrize(("blocks", "source"), DRAWN)
def test_a_block_that_draws_random_numbers_is_refused(blocks, source):
    model = Masked()
    model.blocks[1] = Dropped(source)
    with refused("draws random numbers: it is random, keeps state"):
        measured(model, blocks=blocks)


def test_a_block_that_does_not_use_what_it_draws_is_measured():
    model, block = Masked(), Dropped("torch", used=False)
    block.load_state_dict(model.blocks[1].state_dict())
    expected = measured(model)
    model.blocks[1] = block
    np.testing.assert_array_equal(measured(model).miscoupling, expected.miscoupling)


@pytest.mark.filterwarnings("ignore:block 1 .* measured over the full sequence")
def test_spans_draw_what_blocks_draw():
    model = Masked()
    spans, blocks = measured(model, blocks=SPANS), measured(model)
    np.testing.assert_allclose(spans.miscoupling, blocks.miscoupling, atol=1e-9)
    np.testing.assert_array_equal(spans.random_seed, blocks.random_seed)


def test_a_generator_among_the_inputs_is_not_drawn_from():
    class Given(Masked):
        def forward(self, x, generator):
            self.generator = generator
            return super().forward(x)

    given = seeded(3)
    before = given.get_state()
    first, again = (
        measured(Given("a torch.Generator of the model"), {"x": PROBE, "generator": given})
        for _ in "ab"
    )
    assert torch.equal(given.get_state(), before)
    np.testing.assert_array_equal(first.lss, again.lss)
