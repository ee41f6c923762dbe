"""Load a downloaded checkpoint as a model and tokenizer; an error states in one sentence what is wrong with its weights."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.hub import CheckpointError, first_line, list_branches

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
TOKENIZER_REMEDY = (
    "add --tokenizer NAME (a directory, or a repository on the hub), or --inputs FILE: what the model's forward takes in place "
    "of prompts, saved with torch.save"
)
# Legacy pickles contain constant causal masks and rotary frequencies, which the model computes itself.
REBUILT = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")


def load(directory: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a downloaded checkpoint's model and tokenizer.

    Raises:
        CheckpointError: if a tensor is missing, unexpected or mis-shaped, or a file is damaged or missing.
    """
    if not any(file.name.startswith(TOKENIZER_FILES) for file in directory.iterdir()):
        raise CheckpointError(f"{directory} has no tokenizer; {TOKENIZER_REMEDY}")
    try:
        tokenizer = _tokenizer(directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the tokenizer in {directory} can't be loaded ({first_line(error)}); {TOKENIZER_REMEDY}"
        ) from error
    return load_model(directory), tokenizer


def load_model(directory: Path) -> "PreTrainedModel":
    """Load a downloaded checkpoint's model in the stored dtype; its weights are memory-mapped.

    Raises:
        CheckpointError: if a tensor is missing, unexpected or mis-shaped, or a file is damaged.
    """
    # Otherwise transformers starts a thread that converts legacy weights over the network.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with _readable(directory), without_progress_bars():
        config = AutoConfig.from_pretrained(directory)
        auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
        loaded: Any = auto.from_pretrained(
            directory, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, info = loaded
    _check_tensors(directory, info)
    return model


def init_untrained(model: "PreTrainedModel", seed: int) -> "nn.Module":
    """Build an untrained model of the same class and configuration; preserve the global random state."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return type(model)(model.config)


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{directory} can't be loaded ({type(error).__name__}: {first_line(error)}); if a file is missing or damaged, "
            "download it again"
        ) from error


def lightning_loader(module: str) -> "Callable[[Path], nn.Module]":
    """Return a function that loads a Lightning checkpoint into the user's class, with the stored hyperparameters.

    Args:
        module: the class, as package.module:Class.

    Raises:
        ValueError: if there is no such class. The loader raises CheckpointError for a file that does not fit the class.
    """
    from pickle import UnpicklingError

    where, _, name = module.partition(":")
    try:
        load_from_checkpoint = getattr(importlib.import_module(where), name).load_from_checkpoint
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--module {module}: no such LightningModule ({first_line(error)}); give package.module:Class, in a package that "
            "Python can import"
        ) from error

    def load_file(file: Path) -> "nn.Module":
        try:
            return load_from_checkpoint(file, map_location="cpu").eval()
        except (UnpicklingError, OSError, RuntimeError, EOFError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{file} can't be loaded as {module} ({type(error).__name__}: {first_line(error)}); hyperparameters are read "
                "from the checkpoint: does the class call save_hyperparameters()?"
            ) from error

    return load_file


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a directory or a repository; a cached one is loaded without asking the hub.

    Raises:
        ValueError: if there is none.
    """
    try:
        if Path(name).is_dir():
            return _tokenizer(Path(name))
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

    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    vocabularies = [*tokenizer.vocab_files_names.values(), "tokenizer.json"]
    if isinstance(source, Path):
        found = [file for file in vocabularies if (source / file).is_file()]
    else:
        found = [file for file in vocabularies if isinstance(try_to_load_from_cache(source, file), str)]
    if tokenizer.vocab_files_names and not found:  # a tokenizer of bytes needs no file
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


def _check_tensors(directory: Path, info: dict[str, Any]) -> None:
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
    if described:
        raise CheckpointError(
            f"the weights in {directory} do not fit the model: {'; '.join(described)} tensors. transformers would "
            "initialise missing ones at random, so this checkpoint is not measured; restore its files"
        )
