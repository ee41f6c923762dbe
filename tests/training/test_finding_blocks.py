"""A training finds the blocks that `tracker.measure` finds, and tries the same proposals, where it has inputs."""

from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tracker
from tests.support import home_made
from tests.support.draws import normal
from tests.support.home_made import TwoTowers
from tests.support.lightning_runs import trainer
from tests.support.refused import refused
from tests.support.trainer import make
from tracker.common.errors import UsageError

X = normal(2, 4, home_made.WIDTH, seed=0)


class Row(nn.Module):
    """A module that moves no information between tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(home_made.WIDTH, home_made.WIDTH) for _ in range(2))

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class OtherList(nn.Module):
    """Two lists of modules, of which a forward pass shows one as blocks."""

    def __init__(self):
        super().__init__()
        self.mixers = nn.ModuleList(home_made.Flat() for _ in range(3))
        self.rows = nn.ModuleList(Row() for _ in range(3))

    def forward(self, x):
        for block in (*self.mixers, *self.rows):
            x = block(x)
        return x


class InLightning(lightning.LightningModule):
    """A module whose own modules are those of a model."""

    def __init__(self, model):
        super().__init__()
        self.forward_of = type(model).forward
        self._modules |= model._modules

    def forward(self, x):
        return self.forward_of(self, x)

    def training_step(self, batch, index):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def watched(model, probe) -> list:
    with tracker.Watch(1, k=2, probe=probe) as watch:
        return [watch(0, model)]


def in_lightning(model, probe) -> list:
    units = []
    callback = tracker.CouplingCallback(1, k=2, probe=probe, on_measure=units.append)
    trainer([callback], max_steps=1).fit(InLightning(model), DataLoader(X, 2))
    return units


@pytest.mark.parametrize(
    ("train", "probe"),
    [(watched, X), (watched, lambda model: SimpleNamespace(x=X)), (in_lightning, X)],
    ids=["watch", "function", "lightning"],
)
def test_blocks_that_a_forward_pass_shows(train, probe):
    model = OtherList()
    with refused("not tried"):
        tracker.find_blocks(model)
    state = torch.get_rng_state()
    unit = train(model, probe)[0]
    assert train is in_lightning or torch.equal(torch.get_rng_state(), state)
    expected = tracker.measure(model, X, k=2)
    assert unit.attrs["blocks"] == expected.attrs["blocks"] == "mixers.0, mixers.1, mixers.2"
    np.testing.assert_array_equal(unit.miscoupling, expected.miscoupling)


@pytest.mark.parametrize("train", [watched, in_lightning])
def test_proposals_are_tried(train):
    model = TwoTowers(home_made.Torch)
    with pytest.raises(UsageError) as asked:
        tracker.measure(model, X, k=2)
    with refused("each line was tried on these inputs") as trained:
        train(model, X)
    assert str(trained.value).replace("InLightning", "TwoTowers") == str(asked.value)


@pytest.mark.slow
def test_the_first_samples_of_transformers_trainer(tmp_path):
    runner = make(tmp_path)
    runner.model = runner.model_wrapped = TwoTowers(home_made.Torch)
    runner.train_dataset = [{"x": x} for x in X]
    runner.add_callback(tracker.TransformersCallback(2, k=2))
    with refused("Tried on these inputs|each line was tried on these inputs"):
        runner.train()
