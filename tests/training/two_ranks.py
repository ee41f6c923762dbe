"""Trainings of transformers' Trainer and of a loop on two ranks (DDP, gloo): `python -m tests.training.two_ranks DIRECTORY`."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed

import tracker
from tests.support import plain_loop
from tests.support.trainer import data, make
from tests.training.test_transformers import state

PROBE = torch.stack([row["input_ids"] for row in data()[:3]])  # one rank has two of them


def in_transformers(rank: int, **options) -> list:
    runner = make("unused", ddp_backend="gloo", per_device_train_batch_size=2)
    if options:
        runner.add_callback(tracker.TransformersCallback(3, trainer=runner, **options))
    runner.train()
    return state(runner)


def in_a_loop(rank: int, **options) -> list:
    rows = []
    if not options:
        trained = plain_loop.train(rank=rank)
    else:
        with tracker.Watch(3, log_to=lambda _, step: rows.append(step), **options) as watch:
            trained = plain_loop.train(watch, rank)
    assert set(rows) == ({0, 3, plain_loop.STEPS} if options and rank == 0 else set())
    return [trained.losses, *trained.tensors]


DOORS = {"transformers": in_transformers, "watch": in_a_loop}


def main() -> None:
    directory, rank, found = Path(sys.argv[1]), int(os.environ["RANK"]), {}
    torch.set_num_threads(1)
    for door, train in DOORS.items():
        options = {"k": 2, "probe": PROBE, "save_dir": directory / door}
        for name, given in {"plain": {}, "watched": options}.items():
            losses, *tensors = train(rank, **given)
            found[f"{door} {name}"] = [losses, *(tensor.tolist() for tensor in tensors)]
    (directory / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
