"""The plan of a measurement's Jacobians: the method, how many rows at once, what is kept where, the steps of the bar.

It is made once, from the settings and the first recorded call; measuring, the progress bar and the dry run read it. All memory is
in bytes. `memory`, half of the memory budget, is for Jacobians and what is computed from them.

    kept on "device"    the Jacobians of all blocks at some rows fit into `memory`: one pass over the blocks
    kept on "host"      they fit into the host's memory, beside an accelerator: one pass, and copies
    kept "nowhere"      each is formed twice, for its singular vectors and for the products with all bases: two passes
    "not formed"        matrix-free: products alone, in two passes; residuals, but no certificate that no vector was missed

Columns that each block is multiplied with:

    formed          d
    matrix-free     2 n + L K + 2 K + 80        n: columns of the Krylov iteration

The number of rows and prompts is no part of the choice, so that a prompt gets the same method, with or without a certificate,
whatever else is measured. The Dataset states it (`completeness`).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from tracker.capture.recording import BlockCall, Recording, host_memory
from tracker.common.values import Method
from tracker.jacobians.elimination import MERGING
from tracker.jacobians.rows import PROBES
from tracker.linalg.krylov import basis_fits, basis_size, expected_columns
from tracker.measures.settings import CHOICES, Settings

SQUARES = 16  # random products J z that estimate the trace of J^2
ARRAYS = 5  # of the size of a Jacobian, that the measures of a row's Jacobians take beside it
FORMING = {option.name for option in CHOICES if option.of_jacobians == "formed"}  # measures that need the Jacobians


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
        kept: where the Jacobians of all blocks are kept until their products are known.
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
    kept: Literal["device", "host", "nowhere", "not formed"]
    rows: int

    @property
    def K(self) -> int:
        """The largest number of singular vectors."""
        return max(self.ks)

    @property
    def forms(self) -> bool:
        """Whether Jacobians are formed entry by entry, and certified."""
        return self.kept != "not formed"

    @property
    def passes(self) -> int:
        """The number of passes over the blocks."""
        return 1 if self.kept in ("device", "host") else 2

    @property
    def bytes_of_jacobian(self) -> int:
        """The bytes of one Jacobian."""
        return self.d**2 * self.itemsize

    @property
    def bytes_of_pairs(self) -> int:
        """The bytes of the matrices A of all pairs of blocks at one row, each block's and all together, and of the overlaps."""
        return (2 * (self.of_row * self.K) ** 2 + 4 * self.of_row * self.K**2) * self.itemsize

    @property
    def steps(self) -> int:
        """How often `Jacobians.advance` counts each row.

        Per block: the Jacobian and its singular vectors, and in a second pass the products; measures of blocks ask for the
        Jacobians of blocks that do not keep them.
        """
        if self.passes == 1:
            return 2 * self.of_row
        again = self.L * bool((FORMING | {"depth_use"}) & set(self.measures))
        again += (self.L - 1) * ("products" in self.measures)
        return (3 + ("vju" in self.measures)) * self.of_row + again

    def samples(self, links: int) -> int:
        """Return how many samples are measured together whose token pairs have so many Jacobians in each block."""
        return max(1, self.memory // self.bytes_of_jacobian // links)


def make_plan(settings: Settings, recording: Recording) -> Plan:
    """Return the plan for forward calls like this one."""
    x, device = recording.calls[0].x, recording.calls[0].replica.device
    plan = Plan(
        settings.ks(x.shape[-1]),
        settings.svd,
        settings.measures_of_jacobians(),
        settings.keep,
        x.shape[-1],
        len(recording.calls),
        len(measured_calls(recording)),
        x.itemsize,
        settings.memory(2),
        kept="device",
        rows=1,
    )
    memory, jacobian, of_all = plan.memory, plan.bytes_of_jacobian, plan.of_row * plan.bytes_of_jacobian
    forming = 2 * MERGING * jacobian  # half of this memory is for what forms Jacobians
    host = 0 if device.type == "cpu" else host_memory()
    beside = ARRAYS * jacobian * bool(FORMING & set(plan.measures))
    if _is_matrix_free(plan, x.dtype, device, fits=of_all <= max(memory, host)):
        column = plan.d * plan.itemsize
        rows = memory // ((3 * plan.of_row * plan.K + 2 * basis_size(plan.d, plan.K)) * column)
        return replace(plan, kept="not formed", rows=max(1, min(rows, memory // beside) if beside else rows))
    if of_all <= memory:
        return replace(plan, rows=max(1, memory // (max(of_all, forming) + plan.bytes_of_pairs + beside)))
    rows = max(1, memory // (forming + beside))
    if of_all <= host:
        return replace(plan, kept="host", rows=min(rows, host // of_all))
    return replace(plan, kept="nowhere", rows=rows)


def measured_calls(recording: Recording) -> list[BlockCall]:
    """Return the calls whose Jacobians are measured.

    These are the calls of all blocks and, if the measures include the final norm, the last one with it.
    """
    return recording.calls if recording.normed_last is None else [*recording.calls, recording.normed_last]


def _is_matrix_free(plan: Plan, dtype: torch.dtype, device: torch.device, fits: bool) -> bool:
    """Return whether to measure without forming Jacobians: as requested, or because it is expected to be faster.

    Args:
        fits: whether the Jacobians of all blocks at one row can be kept.
    """
    if plan.svd != "auto" or not basis_fits(plan.d, plan.K):
        return plan.svd == "matrix-free" and basis_fits(plan.d, plan.K)
    # On an accelerator a product of few columns takes as long to launch as a wide one, and the small problems are the host's.
    if device.type != "cpu" and fits:
        return False
    # A product with few columns reads all weights of a block, so a column costs more than in a wide product: on two cores
    # at d = 2048 to 4096, 1.6 times as much for one row in products of 16 columns, and 1.3 times for four rows. The factor
    # 1 + 1 / R approximates this for R rows. Two rows are assumed. Formed Jacobians cost 0.6 d columns of a wide product,
    # decomposition included, because most operations are skipped (`elimination`). Timed on two cores for K = 10 and 50 (d = 2048
    # with 1 and 4 rows, d = 4096 with 1), this takes the slower method once: d = 2048, K = 10, 4 rows, 1.24 times the time.
    return 1.5 * matrix_free_columns(plan.d, plan.of_row, plan.K, dtype) < 0.6 * plan.d


def matrix_free_columns(d: int, of_row: int, K: int, dtype: torch.dtype) -> int:
    """Return the expected number of columns that a block's Jacobian is multiplied with, if it is not formed."""
    return 2 * expected_columns(d, K, dtype) + (of_row + 2) * K + PROBES + SQUARES
