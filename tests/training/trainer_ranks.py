"""A run of transformers' Trainer on two ranks (DDP, gloo): `python -m tests.training.trainer_ranks DIRECTORY`."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed

import tracker
from tests.training.test_transformers import K, data, make, state

OPTIONS = {"ddp_backend": "gloo", "per_device_train_batch_size": 2}


def main() -> None:
    directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    plain = make(directory / "plain", **OPTIONS)
    plain.train()
    watched = make(directory / "watched", **OPTIONS)
    probe = torch.stack([row["input_ids"] for row in data()[:3]])  # one rank has two of them
    watched.add_callback(
        tracker.TransformersCallback(
            3, k=K, probe=probe, trainer=watched, save_dir=str(directory / "store")
        )
    )
    watched.train()
    found = {
        name: [losses, *(tensor.tolist() for tensor in (*tensors, random))]
        for name, (losses, tensors, random) in (
            ("plain", state(plain)),
            ("watched", state(watched)),
        )
    }
    (directory / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
