"""Tests of the integrity checks: planted duplicates, mixed shards and missing files are found by their hashes."""

import itertools

import pytest
import torch

from checkpoints.hub import File, Listing, missing_shards
from checkpoints.integrity import examine, files_digest, find_suspects, fingerprint, known_defect
from checkpoints.suites import Checkpoint, find_suite
from tracker.common.errors import CheckpointError, Unreachable

CONFIG = File("config.json", 500)
SHARDS = [f"pytorch_model-0000{i}-of-00003.bin" for i in (1, 2, 3)]


def listing(step: int, **owners: int | None) -> Listing:
    """Return a listing of three shards unique to the step, or of other steps, or missing, by name: shard1=8."""
    shards = {i: owners.get(f"shard{i}", step) for i in (1, 2, 3)}
    held = (File(SHARDS[i - 1], 10**9, f"{of}/{i}") for i, of in shards.items() if of is not None)
    return Listing(f"c{step}", (CONFIG, *held))


def suspects(listings: dict[int, Listing], missing: tuple[int, ...] = ()) -> dict[int, str]:
    checkpoints = [
        Checkpoint(step, "org/toy", f"step{step}") for step in sorted((*listings, *missing))
    ]
    return find_suspects(
        checkpoints, {f"step{step}": of_step for step, of_step in listings.items()}
    )


def all_of(step: int) -> dict[str, int]:
    return dict.fromkeys(("shard1", "shard2", "shard3"), step)


# Listings, and the other steps with the same files of each that is suspect
SHARED = {
    "the last weights": (
        [listing(1), listing(2, **all_of(8)), listing(4, **all_of(8)), listing(8)],
        {2: "weights are identical to those of step 4, 8", 4: "weights are identical to those of step 2, 8"},
    ),
    "a shard of the last": (
        [listing(1), listing(2, shard1=8), listing(8)],
        {2: "shards (1 of 3) are identical to those of step 8"},
    ),
    "steps 0 and 1": ([listing(0), listing(1, **all_of(0)), listing(8)], {}),
    "steps 0, 1 and 2": (
        [listing(0), listing(1, **all_of(0)), listing(2, **all_of(0)), listing(8)],
        {2: "weights are identical to those of step 0, 1"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED)
def test_revisions_that_share_files_are_suspect_unless_they_are_steps_0_and_1(case):
    listings, expected = SHARED[case]
    found = suspects({int(of_step.commit[1:]): of_step for of_step in listings})
    assert found == {step: f"its {why}" for step, why in expected.items()}


def test_missing_files_and_revisions_are_suspect():
    found = suspects(
        {
            1: listing(1, shard2=None),
            2: Listing("c", (CONFIG,)),
            4: Listing("c", listing(4).files[1:]),
        },
        (8,),
    )
    assert SHARDS[1] in found[1] and "no weight files" in found[2]
    assert found[4] == "without config.json" and found[8] == "org/toy has no revision step8"


def test_known_defects_are_reported():
    def defects(name: str) -> list[int]:
        return [c.step for c in find_suite(name).checkpoints if known_defect(c)]

    # 76 branches serve main's file and 10 that of step143000, which is rightly one of the 10.
    assert len(defects("2.8b")) == 85 and defects("2.8b-deduped") == []
    assert defects("12b") == [50000, 58000] and defects("410m-seed2") == [111000]
    olmo = Checkpoint(
        101_000, "allenai/OLMo-2-1124-7B", "stage1-step101000-tokens424B", stage="stage1"
    )
    assert "allenai/OLMo/issues/915" in str(known_defect(olmo))
    assert known_defect(Checkpoint(101_000, "allenai/OLMo-2-1124-7B", "x", stage="stage2")) is None


def test_known_defects_need_no_network(monkeypatch):
    def unreachable(*_):
        raise Unreachable("no network, and nothing of the suite is in the cache") from Unreachable(
            "no network"
        )

    monkeypatch.setattr("checkpoints.hub.list_branches", unreachable)
    suite = find_suite("12b")
    examination = examine(suite, suite.select("128,50000"))
    assert examination.suspect.keys() == {50_000} and examination.offline == "no network"


def test_one_format_and_its_index_are_fetched():
    names = [
        "config.json",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "README.md",
        "optimizer.bin",
    ]
    shards = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "onnx/model.safetensors",
    ]
    both = Listing("c", tuple(File(name, 1) for name in [*names, *shards, *SHARDS]))
    assert [f.name for f in both.needed] == [
        "config.json",
        "model.safetensors.index.json",
        *shards[:2],
    ]
    # If one format is incomplete, the other is chosen.
    broken = Listing("c", tuple(File(name, 1) for name in [*names, shards[0], *SHARDS]))
    assert [f.name for f in broken.needed] == [
        "config.json",
        "pytorch_model.bin.index.json",
        *SHARDS,
    ]
    assert missing_shards(broken.formats["safetensors"]) == [shards[1]]


def weights() -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(3, 4).half().float(),
        "b": torch.randn(5).half().float(),
        "n": torch.tensor([1, 2]),
    }


def test_fingerprint_depends_only_on_names_shapes_and_values():
    tensors = weights()
    own = fingerprint(tensors.items())
    assert all(fingerprint(some) == own for some in itertools.permutations(tensors.items()))
    stored_in_half = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    assert fingerprint(stored_in_half.items()) == own
    # Neither strides count, nor what is no tensor, nor in which form values are kept
    for same in (
        {"a": tensors["a"].T.contiguous().T},
        {"b._extra_state": {"amax": tensors["b"]}, "program": "train.py"},
        {"a": tensors["a"].to_sparse()},
        {"a": torch.complex(tensors["b"][:1], -tensors["a"]).conj().imag},
    ):
        assert fingerprint((tensors | same).items()) == own
    others = [
        tensors | {"a": tensors["a"].view(4, 3)},
        tensors | {"a": tensors["a"] + torch.eye(3, 4) * 1e-6},
        tensors | {"a": -tensors["a"]},
        {"c" if name == "a" else name: t for name, t in tensors.items()},
        tensors | {"n": torch.tensor([1, 3])},
    ]
    assert len({own, *(fingerprint(other.items()) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("value", "buffers"), [(torch.nan, ()), (torch.nan, ("b",)), (torch.inf, ()), (-torch.inf, ())]
)
def test_weights_that_are_not_finite_are_refused_and_buffers_that_are_nan(value, buffers):
    """Infinite buffers: test_units."""
    tensors = weights()
    tensors["b"][2] = value
    with pytest.raises(CheckpointError, match="NaN or infinite weights in b"):
        fingerprint(tensors.items(), buffers)


def test_digest_of_files_is_the_same_from_hub_and_disk(tmp_path, monkeypatch):
    import hashlib

    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path / "cache"))
    content = b"weights"
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    published = Listing(
        "c", (CONFIG, File("model.safetensors", 7, hashlib.sha256(content).hexdigest()))
    )
    assert files_digest(tmp_path) == files_digest(tmp_path, published)
    (tmp_path / "model.safetensors").write_bytes(b"retrained")
    assert files_digest(tmp_path) != files_digest(tmp_path, published)
