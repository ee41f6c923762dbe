"""The tiny suite on a local hub."""

import shutil

import pytest

from tests.support.hub_server import serve
from tests.support.shards import shard
from tests.support.suite import STEPS, checkpoint_of


@pytest.fixture
def served(suite, tmp_path, monkeypatch):
    """Serve the tiny suite, sharded, from a local hub; the caches of walker and test process are empty."""
    root = tmp_path / "hub"
    shutil.copytree(suite, root)
    for step in STEPS:
        shard(checkpoint_of(root, step))
    with serve(root) as server:
        monkeypatch.setenv("TRACKER_CACHE", str(tmp_path / "ours"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        server.be_used(monkeypatch)
        monkeypatch.setattr("checkpoints.retries.FIRST_PAUSE", 0.05)
        yield server
