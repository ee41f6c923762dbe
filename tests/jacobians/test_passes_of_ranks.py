"""Ranks whose forward passes wait for each other run as many passes, also if one of them would ask the model again."""

from unittest.mock import patch

import torch
from torch import distributed, nn

import tracker
from tests.support import processes
from tests.support.home_made import WIDTH, Flat
from tracker.common.errors import UsageError
from tracker.jacobians.witness import Witness

MEASURE = "import sys; from tests.jacobians.test_passes_of_ranks import measure; measure(sys.argv[2], int(sys.argv[3]))"


class Waiting(nn.Module):
    def forward(self, x):
        total = x.detach().sum()
        distributed.all_reduce(total)
        return x + 0 * total


def measure(file: str, rank: int):
    """Measure on one rank; on rank 1, the values that the model gives are wrong."""
    distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    compare = Witness.compare_values

    def compared(*arguments):
        right, error = compare(*arguments)
        return right & (rank == 0), error

    model = nn.Sequential(Waiting(), Flat(), Flat())
    with patch.object(Witness, "compare_values", compared):
        try:
            tracker.measure(model, torch.randn(2, 4, WIDTH), k=2, blocks=["1", "2"])
        except UsageError as error:
            print(error)
    distributed.barrier()


def test_ranks_that_wait_for_each_other_ask_as_often(tmp_path):
    ranks = [
        processes.start("tests.support.statements", MEASURE, tmp_path / "ranks", rank)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert "computes another output" in said[1] and "computes" not in said[0]
