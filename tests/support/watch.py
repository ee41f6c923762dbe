"""A callback that keeps its units, and the probe that it measures."""

from tests.support.draws import normal
from tracker.training.callback import CouplingCallback

PROBE = normal(5, 6, 8)


class Watch(CouplingCallback):
    """A callback that keeps its units."""

    def __init__(self, every_n_steps=None, **options):
        options = {"k": 2, "probe": PROBE, **options}
        super().__init__(every_n_steps, on_measure=self.keep, **options)
        self.units = {}

    def keep(self, unit):
        assert int(unit.step) not in self.units, "measured twice"
        self.units[int(unit.step)] = unit
