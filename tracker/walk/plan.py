"""Plan a walk: check its settings, and what the hub publishes of its revisions, before anything is fetched.

`stays_on_device` and `default_budget` say where a model's weights stay while it is measured, and the memory budget by default.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

from checkpoints import hub, integrity, scores
from checkpoints.disk import DiskBudget, missing_files
from checkpoints.fetch import cached_snapshot, snapshot_dir
from checkpoints.load import TOKENIZER_FILES, TOKENIZER_REMEDY
from checkpoints.suites import Checkpoint, Suite
from tracker.common.errors import CheckpointError
from tracker.common.files import Lock
from tracker.common.text import UNTRAINED, first_line
from tracker.walk.command import Walk
from tracker.walk.prompts import load_prompts, prompts_digest

if TYPE_CHECKING:
    import torch

    from tracker.measures.settings import Settings
    from tracker.store import Store


def default_budget(device: "torch.device", weights: int, total: int | None = None) -> int:
    """Return the default memory budget; it depends on the machine and the model, not on the memory that happens to be free.

    It is half of an accelerator's memory or, where the weights leave less, what they leave, if that is at least an eighth. On
    the CPU, and beside an accelerator that does not report its memory, it is a quarter of the machine's memory.

    Args:
        total: the memory of an accelerator that is not there.
    """
    from tracker.model.recording import host_memory

    if total is None:
        memory = _free_and_total(device)
        if memory is None:
            return host_memory()
        _, total = memory
    left = total * 9 // 10 - weights  # a tenth for the driver, libraries and fragmentation
    return left if total // 8 <= left < total // 2 else total // 2


def stays_on_device(device: "torch.device", weights: int, budget: int) -> bool:
    """Return whether all weights are to stay on the device: they and the budget fit into what is free."""
    if device.type == "cpu":
        return False
    memory = _free_and_total(device)
    # A device that does not report its memory is taken to have half a budget more.
    free = budget + budget // 2 if memory is None else memory[0]
    return weights + budget <= free


def _free_and_total(device: "torch.device") -> tuple[int, int] | None:
    """Return the free and the total bytes of a device, if it reports them; memory that PyTorch holds unused is free."""
    import torch

    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info(device)
    if hasattr(module, "memory_reserved"):
        free += module.memory_reserved(device) - module.memory_allocated(device)
    return free, total


@dataclass(frozen=True, kw_only=True)
class SelectedCheckpoints(integrity.Examination):
    """The checkpoints to measure, and what the hub publishes of them. Suspect ones may be left out of `checkpoints`."""

    suite: Suite
    checkpoints: tuple[Checkpoint, ...]

    def to_fetch(self, checkpoint: Checkpoint, listing: hub.Listing) -> list[hub.File]:
        """Return the files of a listed checkpoint that the cache lacks."""
        directory = snapshot_dir(checkpoint.source, listing.commit, self.suite.cache_dir)
        return missing_files(directory, listing)

    def may_have_tokenizer(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has a tokenizer, as far as the names of its files are known before any is fetched."""
        if checkpoint.revision is None:
            files = Path(checkpoint.source).iterdir()
        elif listing := self.listings.get(checkpoint.name):
            files = listing.files
        else:
            return True
        return any(file.name.startswith(TOKENIZER_FILES) for file in files)

    def digest(self, checkpoint: Checkpoint) -> str:
        """Return a hash of a checkpoint's weight files; "" if there are none, or they are not known before they are fetched."""
        if checkpoint.seed is not None or checkpoint.name in self.unlisted:
            return ""
        directory, listing = Path(checkpoint.source), None
        if checkpoint.revision is not None:
            listing = self.listings.get(checkpoint.revision)
            if listing is not None and all(file.sha256 for file in listing.weights):
                return integrity.files_digest(directory, listing)
            try:
                directory = cached_snapshot(
                    checkpoint.source, checkpoint.revision, self.suite.cache_dir
                )
            except CheckpointError:
                return ""
        return integrity.files_digest(directory, listing, self.suite.own_code)


@dataclass(frozen=True)
class Measurement:
    """How each checkpoint is loaded and measured."""

    settings: "Settings"  # without the memory budget, which depends on the model if none is given
    memory_budget: int | None
    # A directory to a model and, if the inputs are prompts, a tokenizer
    load: Callable[[Path], tuple[Any, Any]]
    inputs: Any
    inputs_digest: str
    prompt_labels: dict[str, list]  # coordinates along `prompt`: difficulty, prompt_source
    max_tokens: int | None
    device: "torch.device"
    own_code: bool  # whether the user's code loads
    blocks: str | list[str] | None


@dataclass(frozen=True)
class Output:
    """Where the units go, and what is added to each."""

    store: "Store"
    settings_sha256: str
    scores: scores.Scores
    scores_from: str
    held: Lock | None = None  # on the store's settings


@dataclass(frozen=True)
class WalkPlan:
    """A walk whose settings have been checked."""

    selection: SelectedCheckpoints
    measurement: Measurement
    output: Output
    disk: DiskBudget
    notices: list[str]


def store_of(walk: Walk, suite: Suite) -> "Store":
    """Return the store that a walk writes, which may not exist."""
    from tracker.store import Store

    return Store(walk.out or Path("results") / suite.name)


def make_plan(walk: Walk, suite: Suite, notify: Callable[[str], None] = print) -> WalkPlan:
    """Check a walk's settings, and what the hub publishes of its revisions, before anything is fetched or trained.

    Raises:
        ValueError, CheckpointError: for settings that can't be used; the message says what is allowed.
    """
    joined = (
        scores.read_user_scores(walk.scores, suite) if walk.scores else scores.load_published(suite)
    )
    measurement = _measurement(walk)
    disk = DiskBudget(suite.cache_dir, walk.disk_budget)
    selection = _selection(walk, suite, joined, notify)
    own_tokenizers = walk.inputs is None and walk.tokenizer is None
    store = store_of(walk, suite)
    missing = [one for one in selection.checkpoints if not store.has(one.step)]
    if own_tokenizers and missing and not any(map(selection.may_have_tokenizer, missing)):
        raise CheckpointError(f"{suite.source} has no tokenizer; {TOKENIZER_REMEDY}")
    output = _output(walk, suite, measurement, joined)
    notices = [suite.notice] if suite.notice else []
    if joined:
        trained = [one.step for one in selection.checkpoints if one.seed is None]
        notices.append(scores.describe_coverage(joined, trained, output.scores_from))
    return WalkPlan(selection, measurement, output, disk, notices)


def _measurement(walk: Walk) -> Measurement:
    import torch

    from tracker.measures.options import settings_from
    from tracker.provenance import usable_device

    digest, inputs, labels = read_inputs(walk)
    load = _loader(walk)
    # On another machine's device nothing runs here.
    device = "cpu" if walk.on else walk.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = usable_device(device, f"--device {device}")
    settings = settings_from(walk.options, "walk")
    budget = walk.options.get("memory_budget")
    return Measurement(
        settings,
        budget,
        load,
        inputs,
        digest,
        labels,
        walk.max_tokens,
        device,
        bool(walk.own_code),
        walk.blocks,
    )


def _selection(
    walk: Walk, suite: Suite, joined: scores.Scores, notify: Callable[[str], None]
) -> SelectedCheckpoints:
    chosen = suite.select(None if walk.steps is None else str(walk.steps), joined)
    # The sizes of Pythia's files follow from its shape.
    examined = integrity.examine(suite, chosen, notify, ask=not (walk.dry_run and suite.shape))
    suspect = () if walk.allow_suspect else examined.suspect
    kept = tuple(checkpoint for checkpoint in chosen if checkpoint.step not in suspect)
    if walk.untrained is not None:
        if not 0 <= walk.untrained < 2**63:
            raise ValueError(
                f"--untrained {walk.untrained}; a seed is a whole number from 0 to 2^63 - 1"
            )
        if kept:
            kept = (suite.untrained(kept[0], walk.untrained), *kept)
    return SelectedCheckpoints(**vars(examined), suite=suite, checkpoints=kept)


def _output(walk: Walk, suite: Suite, measurement: Measurement, joined: scores.Scores) -> Output:
    from tracker.netcdf import DamagedFile
    from tracker.provenance import settings_digest

    store = store_of(walk, suite)
    identity = _identity(walk, suite, measurement)
    lock = None
    if not walk.dry_run or store.steps():  # a dry run writes nothing
        lock = store.check_settings(identity, hold=not walk.dry_run)
    if walk.untrained is not None and store.has(0):
        with suppress(DamagedFile):  # it is measured again
            revision = store.curve([0], ["revision"])["revision"].item()
            if revision != f"{UNTRAINED}{walk.untrained}":
                raise ValueError(
                    f"--untrained {walk.untrained}: {store.path} has another step 0 ({revision}); choose another --out"
                )
    scores_from = str(walk.scores or "the suite's own, zero-shot")
    return Output(store, settings_digest(identity), joined, scores_from, lock)


def _identity(walk: Walk, suite: Suite, measurement: Measurement) -> dict[str, Any]:
    """Return the settings that all units of the walk's store share."""
    from tracker.provenance import SCHEMA

    always = ["k", "tokens", "final_norm", "dtype"]
    if "measures" in walk.options:
        always.append("measures")
    identity = {"schema": SCHEMA, "model": suite.source, "prompts": measurement.inputs_digest}
    identity |= measurement.settings.identity(always) | {"max_tokens": walk.max_tokens}
    identity |= {"blocks": walk.blocks} if walk.blocks else {}
    # In any order they give the same results.
    if identity["k"]:
        identity["k"] = sorted(set(identity["k"]))
    # Stages of one training are of one repository.
    identity |= {"suite": suite.name} if suite.checkpoints[0].stage else {}
    if walk.own_code:
        if "<lambda>" in walk.own_code:
            raise ValueError(
                "load= is a lambda; give a function with a name: a store belongs to the function that loads its weights"
            )
        identity |= {"load" if walk.load else "module": walk.own_code, "tokenizer": walk.tokenizer}
    elif walk.tokenizer and walk.inputs is None:
        # A directory has many paths, and one place.
        directory = Path(walk.tokenizer)
        identity["tokenizer"] = str(directory.resolve()) if directory.is_dir() else walk.tokenizer
    return identity | ({"suite": suite.cache_dir.name} if suite.cache_dir is not None else {})


def read_inputs(walk: Walk) -> tuple[str, Any, dict[str, list]]:
    """Return a hash of the inputs, the inputs, and the labels of the prompts, as coordinates."""
    from tracker.provenance import digest

    if walk.inputs is None:
        prompts = [
            prompt._replace(text=prompt.text + walk.suffix) for prompt in load_prompts(walk.prompts)
        ]
        texts, difficulties, sources = map(list, zip(*prompts, strict=True))
        columns = {"difficulty": difficulties, "prompt_source": sources}
        labels = {name: column for name, column in columns.items() if None not in column}
        return prompts_digest(prompts), texts, labels
    import torch

    if not isinstance(walk.inputs, (str, Path)):
        return digest(walk.inputs)[:16], walk.inputs, {}
    form = (
        "give a file that torch.save wrote, with a tensor or a dictionary of tensors, batch first"
    )
    try:
        inputs = torch.load(walk.inputs, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"--inputs {walk.inputs} is not read: it holds other objects than tensors, whose pickles can run code; {form}. Of "
            "what a tokenizer returns: torch.save(dict(encoding), FILE)"
        ) from error
    except Exception as error:  # torch raises errors of many types for a damaged file
        raise ValueError(
            f"--inputs {walk.inputs} can't be read ({first_line(error)}); {form}"
        ) from error
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    if not any(isinstance(value, torch.Tensor) and value.dim() for value in values):
        raise ValueError(
            f"--inputs {walk.inputs} holds {shortened(inputs)} ({type(inputs).__name__}); {form}"
        )
    return digest(inputs)[:16], inputs, {}


def _loader(walk: Walk) -> Callable[[Path], tuple[Any, Any]]:
    """Return the function that loads a directory or file."""
    from checkpoints import load

    if walk.inputs is None and walk.tokenizer is None:
        if walk.own_code:
            flag = "--load" if walk.load else "--module"
            raise ValueError(
                f"{flag} needs --tokenizer NAME for the prompts, or --inputs FILE in their place"
            )
        return load.load
    load_file, tokenizer = load.load_model, None
    if walk.load:
        load_file = load.users_loader(walk.load)
    elif walk.module:
        load_file = load.lightning_loader(walk.module)
    if walk.inputs is None and walk.tokenizer:
        tokenizer = load.load_tokenizer(walk.tokenizer)
    return lambda file: (load_file(file), tokenizer)
