"""Fetch a checkpoint's files and load them, or say in one sentence what is wrong with them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Legacy pickles carry constant causal masks and rotary frequencies; they are rebuilt, not loaded.
REBUILT = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")
TEXT_FILES = ("*.json", "*.txt", "*.model")


class CheckpointError(Exception):
    """A checkpoint that can't be had or can't be trusted; the message says which, why and what to do."""


def branches(repo: str) -> list[str]:
    """The branches of a repository: asked of the hub, or, offline, those in the cache.

    Raises:
        CheckpointError: if there is no such repository, or it can't be reached and nothing of it is cached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
    from huggingface_hub.utils import httpx

    try:
        return [reference.name for reference in HfApi().list_repo_refs(repo).branches]
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"the hub has no repository {repo} (or it is private and you are not logged in)"
        ) from error
    except (httpx.HTTPError, OfflineModeIsEnabled) as error:
        references = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "refs"
        if references.is_dir():
            return [file.name for file in references.iterdir()]
        raise CheckpointError(
            f"can't reach the hub for {repo} ({_reason(error)}), and nothing of it is cached"
        ) from error


def fetch(repo: str, revision: str, cache_dir: Path | None = None, local_only: bool = False) -> Path:
    """The directory with a revision's files, downloaded where they are not in the cache.

    Only one weight format is fetched, safetensors where it is published.

    Raises:
        CheckpointError: if the revision is not published, or can't be reached and is not cached.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import httpx

    unreachable = "offline mode is on" if constants.HF_HUB_OFFLINE or local_only else ""
    if not unreachable:
        try:
            info = HfApi().model_info(repo, revision=revision)
            names = [file.rfilename for file in info.siblings or []]
            weights = "*.safetensors" if any(name.endswith(".safetensors") for name in names) else "pytorch_model*.bin"
            patterns = [weights, *TEXT_FILES]
            return Path(snapshot_download(repo, revision=revision, cache_dir=cache_dir, allow_patterns=patterns))
        except RevisionNotFoundError as error:
            raise CheckpointError(f"{repo} has no revision {revision}; see its branches on the hub") from error
        except RepositoryNotFoundError as error:
            raise CheckpointError(
                f"the hub has no repository {repo} (or it is private and you are not logged in)"
            ) from error
        except (httpx.HTTPError, OfflineModeIsEnabled) as error:
            unreachable = f"the hub can't be reached ({_reason(error)})"
    try:
        return Path(snapshot_download(repo, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except LocalEntryNotFoundError as error:
        where = cache_dir or constants.HF_HUB_CACHE
        raise CheckpointError(
            f"{unreachable}, and {repo} at {revision} is not in the cache {where}; go online, or choose cached revisions"
        ) from error


def load(directory: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model of a fetched checkpoint, in the dtype it is stored in, and its tokenizer.

    Raises:
        CheckpointError: if a tensor is missing, unexpected or mis-shaped, or a file is damaged.
    """
    # Else transformers starts a thread that converts legacy weights over the network.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        with without_progress_bars():
            config = AutoConfig.from_pretrained(directory)
            auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
            loaded: Any = auto.from_pretrained(
                directory, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
            )
            tokenizer = AutoTokenizer.from_pretrained(directory)
        model, info = loaded
        if len(tokenizer) == 0:
            raise CheckpointError(f"{directory} has no tokenizer; put the tokenizer's files beside the weights")
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{directory} can't be loaded ({type(error).__name__}: {_reason(error)}); if a file is missing or damaged, "
            "fetch it again"
        ) from error
    _refuse_other_tensors(directory, info)
    return model, tokenizer


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Transformers' bars per file say nothing beside a walk's own progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _refuse_other_tensors(directory: Path, info: dict[str, Any]) -> None:
    faults = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(k for k in info["unexpected_keys"] if not k.endswith(REBUILT)),
        "mis-shaped": sorted(str(entry[0]) for entry in info["mismatched_keys"]),
    }
    described = [
        f"{len(k)} {kind} ({', '.join(k[:3])}{', …' if len(k) > 3 else ''})" for kind, k in faults.items() if k
    ]
    if described:
        raise CheckpointError(
            f"the weights in {directory} are not this model's: {'; '.join(described)} tensors. transformers would fill "
            "them in at random; nothing is measured from them"
        )


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
