"""Shapes are types: every jaxtyping annotation in the package is checked while the tests run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

from jaxtyping import install_import_hook

MATHS = ("coupling", "jacobian", "svd", "trajectory", "rows", "replica", "attention")
install_import_hook([f"tracker.{room}" for room in MATHS], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
