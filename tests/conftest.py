"""Fixtures of all tests.

FIRST_CASES=1 runs of a test with parameters the first case alone. CHECK_SHAPES=1 does, too, and checks the package's jaxtyping
annotations at every call, which doubles the time.
"""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Programs that tests start and hang up ignore the signal, as after `nohup`, if this process does.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

CHECK_SHAPES = os.environ.get("CHECK_SHAPES") == "1"
if CHECK_SHAPES:
    import random
    from importlib.util import find_spec
    from typing import no_type_check

    # beartype checks an item of a list drawn at random: from numbers of its own, so that no block seems to draw some.
    random.getrandbits = random.Random(0).getrandbits

    from jaxtyping import install_import_hook

    packages = [f"tracker.{name}" for name in ("linalg", "model", "spans", "jacobians", "measures")]
    assert all(map(find_spec, packages)), "a package has another name, and would not be checked"
    install_import_hook(packages, "beartype.beartype")

    from tracker.linalg import linear, precision
    from tracker.model import guard

    # PyTorch calls these at every operation: if their annotations were checked each time, tests would take a third longer.
    for function in (
        precision._sizes,
        precision.Roundings.__torch_function__,
        linear.FrozenLinear.__torch_function__,
        guard.WriteGuard.__torch_dispatch__,
    ):
        no_type_check(function)

from collections import Counter  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from _pytest.doctest import DoctestModule  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from checkpoints import nano  # noqa: E402
from tests.support import processes  # noqa: E402

# By default Hypothesis fails a property that takes 0.2 s, as any does while other processes have the cores.
settings.register_profile(
    "at any pace", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("at any pace")

# torch is imported where it is used: the process that distributes tests to others reads this file and needs none of it.
ROOT = processes.ROOT
TINY = nano.NanoRecipe(
    characters=120_000,
    layers=3,
    width=32,
    heads=4,
    vocabulary=320,
    context=64,
    batch=4,
    length=32,
    steps=(0, 1, 2, 4, 8),
)


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def suite(tmp_path_factory) -> Path:
    """Train a tiny suite of checkpoints with the code that trains nano; return its Hugging Face cache directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKER_CACHE", str(tmp_path_factory.mktemp("cache")))
        return nano.train(recipe=TINY)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    from tests.support.browser import CHROMIUM

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


USUAL = ("--measures", "coupling,trajectory")


class Walker:
    """Runner of `python -m tracker.pythia` over the tiny suite, in a separate process; `cold` is as in `processes.start`."""

    def __init__(self, cache: Path, directory: Path):
        self.cache, self.directory = cache, directory
        self.prompts = directory / "prompts.txt"
        self.prompts.write_text(
            "import os\nThe function raises\nfor name in sorted(names):\\n    print(\n"
        )

    def arguments(self, *more: str, model: str = "block-coupling/nano") -> list[str]:
        """Return a walk's command line; the options in `more` override the defaults."""
        given = ["--model", model, "--prompts", str(self.prompts), "--k", "4,8", "--device", "cpu"]
        # A fifth of the time of the default measures, USUAL
        return [*given, "--measures", "entropy", "--out", str(self.out), "--wandb", "off", *more]

    @property
    def out(self) -> Path:
        return self.directory / "out"

    @property
    def store(self):
        from tracker.store import Store

        return Store(self.out)

    def main(self, *arguments: str, **options: str) -> int:
        """Walk in this process; return the exit status."""
        from tracker import pythia

        return pythia.main(self.arguments(*arguments, **options))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a walk's process."""
        hub = {"HF_HUB_CACHE": str(self.cache), "HF_HUB_OFFLINE": "1"}
        own = {"HOME": str(self.directory), "NETRC": str(self.directory / "netrc")}
        inherited = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
        return inherited | hub | own

    def start(
        self,
        *arguments: str,
        model: str = "block-coupling/nano",
        wandb: str = "off",
        cold: bool = False,
        before: str = "",
        **environment: str,
    ):
        """Start a walk, after statements if there are any."""
        settings = self.environment | environment
        given = self.arguments("--wandb", wandb, *arguments, model=model)
        if before:
            code = f"{before}\nimport sys\nfrom tracker.pythia import main\nsys.exit(main({given}))"
            return processes.start("tests.support.statements", code, env=settings, cold=cold)
        return processes.start("tracker.pythia", *given, env=settings, cold=cold)

    def run(self, *arguments: str, **options) -> tuple[int, str, str]:
        """Run a walk; return exit status, standard output and standard error."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Where temporary files are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def walker(suite, tmp_path, monkeypatch) -> Walker:
    """Return a runner of walks; those in this process read the suite, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(suite))
    return Walker(suite, tmp_path)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for doctests outside of tests/ alone: here are none, and helpers would be imported twice."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


def pytest_collection_modifyitems(config, items):
    if CHECK_SHAPES or os.environ.get("FIRST_CASES") == "1":
        first = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
        items[:] = first.values()
    # The files that take longest first, so that all processes end together
    if hasattr(config, "workerinput"):
        seconds = Counter()
        for item in items:
            slow = item.get_closest_marker("slow")
            seconds[item.path] += slow.args[0] if slow and slow.args else 5 if slow else 0.2
        items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish(session):
    """Register the pretend device before the first backward pass of the process, at which autograd counts the devices."""
    wanted = any("pretend" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        from tests import pretend_device

        with suppress(pretend_device.NoCompilerError):
            pretend_device.load()


@pytest.fixture
def pretend():
    """Register a second device without hardware; skip the test where there is no compiler."""
    from tests import pretend_device

    try:
        device = pretend_device.load()
    except pretend_device.NoCompilerError as error:
        pytest.skip(str(error))
    with device.available():
        yield device
