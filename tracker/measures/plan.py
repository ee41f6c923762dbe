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

from dataclasses import dataclass
from typing import Literal

import torch

from tracker.capture.recording import BlockCall, Recording, host_memory
from tracker.common.values import Method
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
        extras: measures of pairs of Jacobians, and of each, in addition to the mis-couplings.
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
    extras: tuple[str, ...]
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
        return _of_pairs(self.of_row, self.K) * self.itemsize

    @property
    def steps(self) -> int:
        """How often `Jacobians.advance` counts each row.

        Per block: the Jacobian and its singular vectors, and in a second pass the products; measures of blocks ask for the
        Jacobians of blocks that do not keep them.
        """
        if self.passes == 1:
            return 2 * self.of_row
        again = self.L * bool((FORMING | {"depth_use"}) & set(self.extras)) + (self.L - 1) * ("products" in self.extras)
        return (3 + ("vju" in self.extras)) * self.of_row + again

    def samples(self, links: int) -> int:
        """Return how many samples are measured together whose token pairs have so many Jacobians in each block."""
        return max(1, self.memory // self.bytes_of_jacobian // links)


def make_plan(settings: Settings, recording: Recording) -> Plan:
    """Return the plan for forward calls like this one."""
    x, device = recording.calls[0].x, recording.calls[0].replica.device
    d, of_row, ks, extras = x.shape[-1], len(measured_calls(recording)), settings.ks(x.shape[-1]), settings.extras()
    size, memory = x.itemsize, settings.memory(2)
    host = 0 if device.type == "cpu" else host_memory()
    jacobian, beside = d**2 * size, ARRAYS * d**2 * size * bool(FORMING & set(extras))
    of_all = of_row * jacobian
    if _is_matrix_free(settings.svd, d, of_row, max(ks), x.dtype, device, of_all <= max(memory, host)):
        kept = "not formed"
        rows = memory // (d * (3 * of_row * max(ks) + 2 * basis_size(d, max(ks))) * size)
        rows = min(rows, memory // beside) if beside else rows
    elif of_all <= memory:
        kept, rows = "device", memory // (of_all + _of_pairs(of_row, max(ks)) * size + beside)
    else:
        kept, rows = "nowhere", memory // (jacobian + beside)
        if of_all <= host:
            kept, rows = "host", min(max(1, rows), host // of_all)
    return Plan(
        ks,
        settings.svd,
        extras,
        settings.keep,
        d,
        len(recording.calls),
        of_row,
        size,
        memory,
        kept,
        max(1, rows),
    )


def measured_calls(recording: Recording) -> list[BlockCall]:
    """Return the calls whose Jacobians are measured.

    These are the calls of all blocks and, if the measures include the final norm, the last one with it.
    """
    return recording.calls if recording.normed_last is None else [*recording.calls, recording.normed_last]


def _of_pairs(of_row: int, K: int) -> int:
    return 2 * (of_row * K) ** 2 + 4 * of_row * K**2


def _is_matrix_free(
    svd: Method, d: int, of_row: int, K: int, dtype: torch.dtype, device: torch.device, fits: bool
) -> bool:
    """Return whether to measure without forming Jacobians: as requested, or because it is expected to be faster."""
    if svd != "auto" or not basis_fits(d, K):
        return svd == "matrix-free" and basis_fits(d, K)
    # On an accelerator a product of few columns takes as long to launch as a wide one, and the small problems are the host's.
    if device.type != "cpu" and fits:
        return False
    # A product with few columns reads all weights of a block, so a column costs more than in a wide product: on two cores
    # at d = 2048 to 4096, 1.6 times as much for one row in products of 16 columns, and 1.3 times for four rows. The factor
    # 1 + 1 / R approximates this for R rows. Two rows are assumed: of all constants it wastes least where there is one row, or
    # many, at most 1.5 times the time. Formed Jacobians cost 0.7 d columns of a wide product, decomposition included,
    # because they skip the last layers (`linear`).
    return 1.5 * matrix_free_columns(d, of_row, K, dtype) < 0.7 * d


def matrix_free_columns(d: int, of_row: int, K: int, dtype: torch.dtype) -> int:
    """Return the expected number of columns that a block's Jacobian is multiplied with, if it is not formed."""
    return 2 * expected_columns(d, K, dtype) + (of_row + 2) * K + PROBES + SQUARES
