"""Random changes of checkpoints' files and of their listings: the walk ends, and the sound revisions are measured."""

import copy
import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.hub_server import Hub, serve
from tests.walk.test_walk import STEPS, commit, snapshots
from tests.walk.test_walk_hub import shard
from tracker import pythia
from tracker.store.results import Store

CHANGED = range(1, 26)  # steps
SOUND = (0, 1000)
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json", "listing")
SECONDS = 240  # of a walk over all revisions
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 7, 10**6, 10**12, 2**63, 0.5, float("nan"), float("inf")]),
    st.sampled_from(
        ["", "x", "6", "gelu", "\ud800", "\0", "../../config.json", "/etc/hostname", "{{ 1 }}", "model.bin"]
    ),
    st.just([]),
    st.just({}),
    st.just([None, {"a": []}]),
    st.just(
        {"AutoConfig": "foreign.Config", "AutoModel": "foreign.Model", "AutoTokenizer": ["foreign.A", "foreign.B"]}
    ),
)
KEYS = st.sampled_from(
    ["auto_map", "quantization_config", "torch_dtype", "rope_parameters", "tokenizer_class", "id", "lfs"]
)


@dataclass(frozen=True)
class Change:
    """A change of a file's content."""

    file: str
    kind: str
    position: int
    key: str
    value: Any
    bytes: bytes

    def __call__(self, content: bytes) -> bytes:
        if self.kind == "cut":
            return content[: self.position % len(content)]
        if self.kind == "bytes":
            at = self.position % len(content)
            return content[:at] + self.bytes + content[at + len(self.bytes) :]
        tree, value = json.loads(content), copy.deepcopy(self.value)
        places = list(inner(tree))
        container, at = places[self.position % len(places)]
        if self.kind == "entry":
            tree[self.key] = value
        elif self.kind == "removal":
            del container[at]
        else:
            container[at] = value
        return json.dumps(tree).encode()


CHANGES = st.builds(
    Change,
    st.sampled_from(FILES),
    st.sampled_from(["value", "value", "value", "entry", "removal", "cut", "bytes"]),
    st.integers(0, 2**31),
    KEYS,
    VALUES,
    st.binary(max_size=8),
)


def inner(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container and key of a JSON value; of a long list or mapping, such as a vocabulary, only the first five."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys)[:5] if len(keys) > 60 else keys:
        yield tree, key
        yield from inner(tree[key])


@pytest.fixture(scope="module")
def hub(suite, tmp_path_factory) -> Iterator[Hub]:
    """Serve a repository of one revision for each step, with weights of its own."""
    root = tmp_path_factory.mktemp("hub")
    repository = root / "models--org--fuzzed"
    for step in (*SOUND, *CHANGED):
        directory = shutil.copytree(
            snapshots(suite) / commit(suite, STEPS[-1]), repository / "snapshots" / f"{step:040x}"
        )
        weights = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        save_file(
            {name: value * (1 + step / 1000) for name, value in weights.items()},
            directory / "model.safetensors",
            {"format": "pt"},
        )
        shard(directory)
        reference = repository / "refs" / f"step{step}"
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(f"{step:040x}")
    (root / "prompts.txt").write_text("import os\n")
    with serve(root) as server:
        yield server


@pytest.mark.slow(300)
@settings(
    max_examples=20,  # of 25 revisions
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # without shrinking, which would repeat walks for hours
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(chosen=st.lists(CHANGES, min_size=len(CHANGED), max_size=len(CHANGED)).map(tuple))
def test_every_revision_is_measured_or_named_with_a_reason(hub, tmp_path_factory, chosen):
    server, root = hub, hub.root
    directory = tmp_path_factory.mktemp("walk")
    server.faults.clear()
    originals = {}
    for step, change in zip(CHANGED, chosen, strict=True):
        if change.file == "listing":
            server.fail(rf"/revision/{step:040x}", times=1000, content=change)
        else:
            file = root / "models--org--fuzzed" / "snapshots" / f"{step:040x}" / change.file
            originals[file] = file.read_bytes()
            file.write_bytes(change(originals[file]))
    given = ["--model", "org/fuzzed", "--prompts", str(root / "prompts.txt"), "--measures", "trajectory"]
    given += ["--out", str(directory / "out"), "--loggers=", "--device", "cpu"]
    try:
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")  # it refuses half of a surrogate pair, as a terminal does
        with connected(server, directory), redirect_stderr(io.StringIO()) as err, redirect_stdout(out):
            started = time.monotonic()
            status = pythia.main(given)
            seconds = time.monotonic() - started
    finally:
        for file, content in originals.items():
            file.write_bytes(content)
    out.seek(0)
    printed = f"{out.read()}\n{err.getvalue()}\n" + "\n".join(
        f"step {step}: {change}" for step, change in zip(CHANGED, chosen, strict=True)
    )
    assert status in (0, 1) and "Traceback" not in printed and seconds < SECONDS, printed
    measured = Store(directory / "out").steps()
    assert set(SOUND) <= set(measured), printed
    for step in set(CHANGED) - set(measured):
        assert re.search(rf"(?m)^(failed: |  )[^:]*\b{step}\b[^:]*: ", printed), f"step {step}\n{printed}"
    shutil.rmtree(directory)


@contextmanager
def connected(server: Hub, directory: Path) -> Iterator[None]:
    """Connect the hub's client to the server, with empty caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKER_CACHE", str(directory / "ours"))
        constants = "huggingface_hub.constants"
        patch.setattr(f"{constants}.HF_HUB_CACHE", str(directory / "cache"))
        patch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        patch.setattr(f"{constants}.ENDPOINT", server.endpoint)
        patch.setattr(
            f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr("checkpoints.retries.LONGEST_WAIT", 0.05)
        yield
