"""Load a downloaded checkpoint as a model and tokenizer; an error states in one sentence what is wrong with its weights.

Without `trust_remote_code=False`, transformers' automatic classes run a checkpoint's Python files, or ask on the terminal.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from pickle import UnpicklingError
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

from checkpoints.configuration import check_configuration, check_index, require_size, weights_in
from checkpoints.hub import describe_cache, list_branches
from tracker.common.errors import CheckpointError, UsageError, panics_as_errors
from tracker.common.text import first_line, join_names, printable

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
TOKENIZER_REMEDY = (
    "add --tokenizer NAME (a directory, or a repository on the hub), or --inputs FILE: what the model's forward takes in place "
    "of prompts, saved with torch.save"
)
DAMAGED = "if a file is missing or damaged, download it again"
# By a part of what torch.load and load_state_dict say: what to do in a function that loads a user's file.
CURES = {
    "Weights only load failed": "the file holds other objects than tensors, whose pickles can run code: if it is your own, call "
    "torch.load(path, map_location='cpu', weights_only=False)",
    "Can't get attribute": "the file names a class of the program that wrote it: import the class, and for '__main__' also "
    "set it there (import __main__; __main__.NAME = NAME)",
    '"_orig_mod.': "torch.compile adds the prefix _orig_mod. to names: take it off, name.removeprefix('_orig_mod.')",
    '"module.': "DistributedDataParallel adds the prefix module. to names: take it off, name.removeprefix('module.')",
    "[Errno 2] No such file": "a checkpoint is copied before it is loaded: if the function reads what stands beside it, let "
    "--files match the directory of both",
}
# Legacy pickles contain constant causal masks and rotary frequencies, which the model computes itself.
REBUILT = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")


def load(directory: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a downloaded checkpoint's model and tokenizer.

    Raises:
        CheckpointError: if a tensor is missing, unexpected or mis-shaped, a file is damaged or missing, or the checkpoint needs
            Python code of its own.
    """
    if not any(file.name.startswith(TOKENIZER_FILES) for file in directory.iterdir()):
        raise CheckpointError(f"{directory} has no tokenizer; {TOKENIZER_REMEDY}")
    model = load_model(directory)
    with readable(directory, f"the tokenizer in {directory}", TOKENIZER_REMEDY):
        return model, _tokenizer(directory)


def load_model(directory: Path) -> "PreTrainedModel":
    """Load a downloaded checkpoint's model in the stored dtype; its weights are memory-mapped.

    Raises:
        CheckpointError: if a tensor is missing, unexpected or mis-shaped, a file is damaged, or the model needs code of its own.
    """
    import torch

    # Otherwise transformers starts a thread that converts legacy weights over the network.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    with readable(directory, str(directory), DAMAGED), without_progress_bars():
        check_index(directory)
        config, architecture = read_architecture(directory)
        with torch.device("meta"):
            model = architecture(config)
        require_size(directory, model, weights_in(directory))
        loaded: Any = architecture.from_pretrained(
            directory,
            config=config,
            dtype="auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model, info = loaded
    _check_tensors(directory, model, info)
    return model


def read_architecture(directory: Path) -> "tuple[PreTrainedConfig, type[PreTrainedModel]]":
    """Return a checkpoint's configuration, and the class of transformers that builds its model.

    It is the class that the configuration names; if transformers has none of that name, a language model if there is one of the
    kind.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    check_configuration(directory)
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return config, named
    language = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    models: Any = language if type(config) in language else modeling_auto.MODEL_MAPPING
    return config, models[type(config)]


def init_untrained(model: "nn.Module", seed: int) -> "nn.Module":
    """Build an untrained model of the same class and configuration; preserve the global random state.

    Raises:
        UsageError: if the model is not of transformers, so that its own program alone knows how it is initialised.
    """
    import torch
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"--untrained {seed}: only its own program knows how a {type(model).__name__} is initialised; save it before its "
            "first step in the form of the other files, with 0 as its step: it is walked with them"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return type(model)(model.config)


@contextmanager
def readable(directory: Path, subject: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises for a checkpoint's malformed files into one sentence."""
    try:
        with panics_as_errors():
            yield
    except (CheckpointError, MemoryError):
        raise
    except UnpicklingError as error:
        raise CheckpointError(
            f"a pickle in {directory} holds other objects than tensors, or is damaged, and is not loaded: pickles can run code "
            f"({first_line(error)[:80]} …); publish the weights as safetensors"
        ) from error
    # Libraries raise errors of any type for files that they don't expect
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{directory} needs Python code of its own, and a walk runs no code of a checkpoint: load the model yourself and "
                "call tracker.measure(model, ...)"
            ) from error
        raise CheckpointError(
            f"{subject} can't be loaded ({type(error).__name__}: {first_line(error)}); {remedy}"
        ) from error


def lightning_loader(module: str) -> "Callable[[Path], nn.Module]":
    """Return a function that loads a Lightning checkpoint into the user's class, with the stored hyperparameters.

    Args:
        module: the class, as package.module:Class.

    Raises:
        ValueError: if there is no such class. The loader raises as that of `users_loader`.
    """
    load_from_checkpoint = _imported("module", module, "LightningModule", ".load_from_checkpoint")
    remedy = (
        "hyperparameters are read from the checkpoint: does the class call save_hyperparameters()?"
    )
    return _reporting(partial(load_from_checkpoint, map_location="cpu"), module, remedy)


def users_loader(load: "str | Callable[[Path], nn.Module]") -> "Callable[[Path], nn.Module]":
    """Return the user's function that loads a checkpoint's file or directory, with errors that say what is wrong.

    Args:
        load: the function, or its name as module:function.

    Raises:
        ValueError: if there is no such function. The loader raises UsageError for whatever the function raises, and if it
            returns no model.
    """
    function = _imported("load", load, "function") if isinstance(load, str) else load
    return _reporting(function, name_of_loader(load), "")


def name_of_loader(load: "str | Callable[[Path], nn.Module]") -> str:
    """Return the name of a function that loads checkpoints, as module:function."""
    if isinstance(load, str):
        return load
    function = load.func if isinstance(load, partial) else load
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _imported(flag: str, name: str, kind: str, attribute: str = "") -> Any:
    """Import an object, or an attribute of it, by its name, module:object, from what Python knows and the working directory.

    Raises:
        ValueError: if there is no such object.
    """
    # Which `python -m` adds, and a script that pip has installed does not
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module, _, within = name.partition(":")
    try:
        if module.endswith(".py"):
            dotted = module.removesuffix(".py").replace("/", ".")
            raise ValueError(f"give the module's name, not its file: {dotted}:{within}")
        return attrgetter(within + attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--{flag} {name}: no such {kind} ({first_line(error)}); give module:{kind}, in a module that Python can import "
            f"from {Path.cwd()}"
        ) from error


def _reporting(
    load: "Callable[[Path], nn.Module]", name: str, remedy: str
) -> "Callable[[Path], nn.Module]":
    import torch

    def load_file(path: Path) -> "nn.Module":
        try:
            model = load(path)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # the user's code may raise errors of any type
            cure = next((cure for part, cure in CURES.items() if part in str(error)), "")
            if isinstance(error, KeyError) and path.is_file():
                cure = f"the file holds {_keys(path)}"
            text, cure = printable(str(error), 80 if cure else 500), cure or remedy
            raise UsageError(
                f"{path} can't be loaded by {name} ({type(error).__name__}: {text})"
                + (f"; {cure}" if cure else "")
            ) from error
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"{name} returns a {type(model).__name__} for {path}, and a model is measured, a torch.nn.Module: build it, "
                "give it the weights with load_state_dict, and return it"
            )
        return model

    return load_file


def _keys(path: Path) -> str:
    """Say which entries a file of `torch.save` has, if they can be read without running code."""
    import torch

    try:
        kept = torch.load(path, map_location="meta", weights_only=True)
    except (UnpicklingError, RuntimeError):
        return "other objects than tensors"
    return shortened(list(kept)) if isinstance(kept, dict) else f"a {type(kept).__name__}"


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a directory or a repository; a cached one is loaded without asking the hub.

    Raises:
        ValueError: if there is none.
    """
    directory = Path(name)
    if directory.is_dir() and (cached := describe_cache(directory.resolve(), "--tokenizer")):
        raise ValueError(cached)
    try:
        if directory.is_dir():
            return _tokenizer(directory)
        try:
            return _tokenizer(name, local_files_only=True)
        except (OSError, ValueError):
            list_branches(name)  # transformers would try for a minute to reach the hub
            return _tokenizer(name)
    except (CheckpointError, OSError, ValueError) as error:
        raise ValueError(
            f"--tokenizer {name}: no such tokenizer ({first_line(error)}); give a directory or a repository on the hub"
        ) from error


def _tokenizer(source: Path | str, **options: Any) -> "PreTrainedTokenizerBase":
    """Load a tokenizer.

    Raises:
        OSError, ValueError: if it can't be loaded, or has no vocabulary: from the configuration of a model alone, transformers
            builds a tokenizer without words.
    """
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    vocabularies = [*tokenizer.vocab_files_names.values(), "tokenizer.json"]
    if isinstance(source, Path):
        has_one = any((source / file).is_file() for file in vocabularies)
    else:
        has_one = any(
            isinstance(try_to_load_from_cache(source, file), str) for file in vocabularies
        )
    if tokenizer.vocab_files_names and not has_one:  # a tokenizer of bytes needs no file
        raise ValueError(f"there is none of {', '.join(dict.fromkeys(vocabularies))}")
    return tokenizer


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars for single files; a walk shows its own progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_tensors(directory: Path, model: "PreTrainedModel", info: dict[str, Any]) -> None:
    faults = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(k for k in info["unexpected_keys"] if not k.endswith(REBUILT)),
        "mis-shaped": sorted(str(entry[0]) for entry in info["mismatched_keys"]),
    }
    described = [
        f"{len(names)} {fault} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for fault, names in faults.items()
        if names
    ]
    if not described:
        return
    named, built = model.config.architectures or [], type(model).__name__
    remedy = "transformers would initialise missing ones at random, so this checkpoint is not measured; restore its files"
    if named and built not in named:
        remedy = (
            f"config.json names {join_names(named)}, of which transformers has no class: walk the directories with a function of "
            "yours, --files 'PATTERN' --load my_module:load"
        )
    raise CheckpointError(
        f"the weights in {directory} do not fit {built}: {'; '.join(described)} tensors. {remedy}"
    )
