"""Configurations: those of Pythia, which ship with the package, and checks of a checkpoint's own.

A configuration is refused if it asks for sizes that the files can't hold, or for code that is no part of transformers.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.hub import INDEX
from tracker.common.errors import CheckpointError
from tracker.common.files import read_json

if TYPE_CHECKING:
    from torch import nn
    from transformers import GPTNeoXConfig

PYTHIA = Path(__file__).parent / "data" / "pythia.toml"
CONFIGURATION = "config.json"
# Entries that make transformers build as many modules; the deepest published language models have about 130 blocks
LAYERS, MOST_LAYERS = re.compile(r"layers?$|depths?$|blocks$|experts$"), 1000
VALUES_PER_BYTE = 8  # weights quantized to one bit
MOST_COMPUTED = 10**9  # values of masks and tables, which no file holds
# Any other implementation is code of a package that may not be there, or that transformers fetches from the hub.
IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


@dataclass(frozen=True)
class Shape:
    """A GPT-NeoX model of Pythia's kind: rotary embedding of a quarter of each head, parallel residual, untied unembedding."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int

    @property
    def parameters(self) -> int:
        """The number of parameters: embedding and unembedding, and in each block two norms, attention and MLP."""
        d = self.width
        return 2 * self.vocabulary * d + self.layers * (12 * d**2 + 13 * d) + 2 * d

    @property
    def file_bytes(self) -> int:
        """The bytes of a published checkpoint's weights: parameters in float16, and a causal mask per block, a byte per entry.

        `model.safetensors` of EleutherAI/pythia-70m-deduped has 166,029,852 bytes (its commit e93a9fa); this is 166,019,072.
        """
        return 2 * self.parameters + self.layers * self.context**2

    def config(self, **options: Any) -> "GPTNeoXConfig":
        """Return the configuration for transformers."""
        from transformers import GPTNeoXConfig

        return GPTNeoXConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.context,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            use_parallel_residual=True,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
            **options,
        )


@cache
def pythia_shapes() -> Mapping[str, Shape]:
    """Return the shape of each size of Pythia."""
    data = tomllib.loads(PYTHIA.read_text(encoding="utf-8"))
    return {size: Shape(context=data["context"], **shape) for size, shape in data["sizes"].items()}


def check_configuration(directory: Path) -> None:
    """Check the configuration in a checkpoint's directory before transformers reads it.

    Raises:
        CheckpointError: if it is no mapping, or has an absurd number of layers or an implementation that is no part of
            transformers.
    """
    _check_entries(directory / CONFIGURATION, _entries(directory / CONFIGURATION))


def _check_entries(file: Path, value: Any, name: str = "") -> None:
    """Check a configuration, or the entry `name` of one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # An implementation may be given for each part: {"text_config": "sdpa"}.
            _check_entries(file, inner, name if name.endswith("_implementation") else key)
    elif isinstance(value, list):
        for inner in value:
            _check_entries(file, inner, name)
    if LAYERS.search(name) and isinstance(value, int) and value > MOST_LAYERS:
        raise CheckpointError(
            f"{file} has {name} = {value:,}, and more than {MOST_LAYERS:,} can't be meant: restore the file, or leave this "
            "checkpoint out"
        )
    if (
        name.endswith("_implementation")
        and not isinstance(value, dict)
        and value not in IMPLEMENTATIONS
    ):
        raise CheckpointError(
            f"{file} asks for {name} = {value!r}, which transformers would take from another package or fetch from the hub and "
            f"run; {', '.join(map(str, IMPLEMENTATIONS[1:]))} are allowed: remove the entry, or leave this checkpoint out"
        )


def check_index(directory: Path) -> None:
    """Check the form of the index of weights in several files, if there is one.

    Raises:
        CheckpointError: if it does not map tensors to files of the directory.
    """
    for name in INDEX.values():
        if (directory / name).is_file():
            shards = _entries(directory / name).get("weight_map")
            files = list(shards.values()) if isinstance(shards, dict) else [shards]
            if wrong := [
                file for file in files if not isinstance(file, str) or Path(file).name != file
            ]:
                raise CheckpointError(
                    f"{directory / name} has no weight_map from tensors to files of its directory ({wrong[0]!r}): restore it, or "
                    "leave this checkpoint out"
                )


def weights_in(directory: Path) -> int:
    """Return the bytes of a directory's weight files."""
    return sum(
        file.stat().st_size
        for file in directory.iterdir()
        if file.suffix in (".safetensors", ".bin")
    )


def require_size(directory: Path, model: "nn.Module", stored: int) -> None:
    """Compare a model without memory with the size of its weight files.

    Raises:
        CheckpointError: if the files are too small for the model, or its masks and tables are absurdly large.
    """
    count, computed = (
        sum(tensor.numel() for tensor in tensors)
        for tensors in (model.parameters(), model.buffers())
    )
    most = VALUES_PER_BYTE * stored
    if count > most or computed > most + MOST_COMPUTED:
        raise CheckpointError(
            f"{directory / CONFIGURATION} describes a model of {count:,} parameters and {computed:,} values in masks and tables, "
            f"and the weight files hold {stored:,} bytes: restore its files, or leave this checkpoint out"
        )


def _entries(file: Path) -> dict[str, Any]:
    try:
        return read_json(file, dict, "restore it, or leave this checkpoint out")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
