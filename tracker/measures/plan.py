"""The plan of a measurement's Jacobians: how many rows at once, where they are kept, the steps of the bar.

It is made once, from the settings and the model's shape; measuring, the progress bar and the dry run read it. All memory is
in bytes. `memory`, half of the memory budget, is for Jacobians and what is computed from them. Pairs of blocks need the singular
vectors of all blocks, so that the Jacobians of some rows wait for the last block.

    kept on "device"    the Jacobians of all blocks fit into `memory`
    kept on "host"      they fit into the host's memory, beside an accelerator
    kept in a "file"    they fit into neither
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from tracker.common.values import Method
from tracker.measures.rotations import COLUMNS, entries_of_pair
from tracker.measures.settings import CHOICES, Settings
from tracker.model.recording import host_memory

ARRAYS = 5  # of the size of a Jacobian, that the measures of a row's Jacobians take beside it
# Measures that take `ARRAYS`.
OF_ENTRIES = {option.name for option in CHOICES if option.of_jacobians == "entries"}


@dataclass(frozen=True)
class Plan:
    """How the Jacobians of a measurement are computed.

    Attributes:
        ks: the numbers of singular vectors.
        svd: the algorithm that was asked for.
        measures: measures of pairs of Jacobians, and of each, in addition to the mis-couplings.
        keep: what is returned itself, as in `layers.kept_arrays`.
        d: the width.
        L: the number of blocks.
        of_row: the number of Jacobians at a row: one more than blocks, if the last is also measured with the final norm.
        itemsize: bytes of a number.
        memory: bytes for Jacobians and what is computed from them.
        kept: where the Jacobians of all blocks wait for the bases of all.
        rows: the number of rows that are measured together.
    """

    ks: tuple[int, ...]
    svd: Method
    measures: tuple[str, ...]
    keep: tuple[str, ...]
    d: int
    L: int
    of_row: int
    itemsize: int
    memory: int
    kept: Literal["device", "host", "file"]
    rows: int

    @property
    def K(self) -> int:
        """The largest number of singular vectors."""
        return max(self.ks)

    @property
    def bytes_of_jacobian(self) -> int:
        """The bytes of one Jacobian."""
        return self.d**2 * self.itemsize

    @property
    def bytes_of_pairs(self) -> int:
        """The bytes of what pairs of blocks need at one row.

        These are the matrices A, each block's, all together and of all frames, the overlaps, and three copies of the Jacobians in
        frames.
        """
        of_block = 4 * self.K**2 + 3 * COLUMNS * min(self.d, COLUMNS)
        of_pair = 2 * (self.K**2 + entries_of_pair(self.K))
        return (self.of_row**2 * of_pair + self.of_row * of_block) * self.itemsize

    @property
    def steps(self) -> int:
        """How often `Jacobians.advance` counts each row: in each block, the Jacobian and its singular vectors."""
        return 2 * self.of_row

    def blocks_together(self, rows: int) -> int:
        """Return how many blocks' Jacobians are in memory together: all, or as many as half of it holds."""
        if self.kept == "device":
            return self.of_row
        return min(self.of_row, max(1, self.memory // 2 // (rows * self.bytes_of_jacobian)))

    def samples(self, links: int) -> int:
        """Return how many samples are measured together whose token pairs have so many Jacobians in each block."""
        return max(1, self.memory // self.bytes_of_jacobian // links)


def make_plan(settings: Settings, d: int, L: int, normed: bool, device: torch.device) -> Plan:
    """Return the plan for a model of L blocks of width d; `normed`: whether the last is also measured with the final norm."""
    plan = Plan(
        ks=settings.ks(d),
        svd=settings.svd,
        measures=settings.measures_of_jacobians(),
        keep=settings.keep,
        d=d,
        L=L,
        of_row=L + normed,
        itemsize=settings.torch_dtype.itemsize,
        memory=settings.memory(2),
        kept="device",
        rows=1,
    )
    J = plan.bytes_of_jacobian
    of_all = plan.of_row * J
    forming = 2 * J  # half of this memory holds a block's Jacobian, half what forms it
    beside = ARRAYS * J if OF_ENTRIES & set(plan.measures) else 0
    if of_all <= plan.memory:
        of_row = max(of_all, forming) + plan.bytes_of_pairs + beside
        return replace(plan, rows=max(1, plan.memory // of_row))
    rows = max(1, plan.memory // (forming + beside))
    # On a CPU the host's memory is the budget itself, which was too small.
    host = 0 if device.type == "cpu" else host_memory()
    if of_all <= host:
        return replace(plan, kept="host", rows=min(rows, host // of_all))
    return replace(plan, kept="file", rows=rows)
