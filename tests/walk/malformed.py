"""Checkpoints with one fault each, made from a sound one: malformed files, foreign code, absurd sizes."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SHARD = "model-00001-of-00001.safetensors"


class Executes:
    """An object whose pickle executes code where it is loaded without care: it creates a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def configured(**changes: Any) -> Callable[[Path], None]:
    """Return a function that changes entries of config.json."""

    def change(directory: Path) -> None:
        edit(directory / "config.json", lambda config: config | changes)

    return change


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    """Replace the content of a JSON file."""
    content = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps(change(content)))


def replaced(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Return a function that replaces a file."""

    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def indexed(index: Any) -> Callable[[Path], None]:
    """Return a function that renames the weights as the only shard and adds this index."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / SHARD)
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def pickled(write: Callable[[Any, Path], None]) -> Callable[[Path], None]:
    """Return a function that replaces the weights by a pickle that would create the directory `executed`."""

    def change(directory: Path) -> None:
        weights: dict[str, Any] = dict(load_file(directory / "model.safetensors"))
        (directory / "model.safetensors").unlink()
        weights["harmful"] = Executes(directory / "executed")
        write(weights, directory / "pytorch_model.bin")

    return change


def plainly(weights: Any, file: Path) -> None:
    file.write_bytes(pickle.dumps(weights))


def in_the_old_format(weights: Any, file: Path) -> None:
    torch.save(weights, file, _use_new_zipfile_serialization=False)


def with_code(file: str, **entries: Any) -> Callable[[Path], None]:
    """Return a function that adds a Python module, which creates `executed` when imported, and its entries in a file."""

    def change(directory: Path) -> None:
        (directory / "foreign.py").write_text(
            f"import os\nos.mkdir({str(directory / 'executed')!r})\n"
            "from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast\n"
            "class Config(GPTNeoXConfig):\n    model_type = 'foreign'\n"
            "class Model(GPTNeoXForCausalLM):\n    config_class = Config\n"
            "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
        )
        edit(directory / file, lambda content: content | entries)

    return change


def smaller_vocabulary(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    cut = {name: value[:10].clone() if "embed" in name else value for name, value in weights.items()}
    (directory / "model.safetensors").unlink()
    save_file(cut, directory / "model.safetensors", metadata={"format": "pt"})
    configured(vocab_size=10)(directory)


def fewer_blocks(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    last = max(name.split(".")[2] for name in weights if ".layers." in name)
    (directory / "model.safetensors").unlink()
    kept = {name: value for name, value in weights.items() if f".layers.{last}." not in name}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    configured(num_hidden_layers=int(last))(directory)


def tokenized(**changes: Any) -> Callable[[Path], None]:
    """Return a function that changes entries of tokenizer.json."""
    return lambda directory: edit(directory / "tokenizer.json", lambda content: content | changes)


def infinite_weights(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = float("inf")
    (directory / "model.safetensors").unlink()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


FOREIGN = {
    "configuration and model": with_code(
        "config.json",
        model_type="foreign",
        auto_map={
            "AutoConfig": "foreign.Config",
            "AutoModelForCausalLM": "foreign.Model",
            "AutoModel": "foreign.Model",
        },
    ),
    "code of another repository": with_code(
        "config.json", model_type="foreign", auto_map={"AutoConfig": "somebody/else--foreign.Config"}
    ),
}
PICKLES = {"zip": torch.save, "old": in_the_old_format, "plain": plainly}
# The change, and a part of the message.
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    **{f"foreign code: {name}": (change, "code of its own.*call tracker.measure") for name, change in FOREIGN.items()},
    **{f"pickle: {name}": (pickled(write), "not loaded: pickles can run code") for name, write in PICKLES.items()},
    "index: a list": (indexed([]), "index"),
    "index: without a map": (indexed({"metadata": {}}), "index"),
    "index: numbers": (indexed({"weight_map": {"gpt_neox.embed_in.weight": 7}}), "index"),
    "index: a map that is a list": (indexed({"weight_map": []}), "index"),
    "index: another checkpoint": (
        indexed({"weight_map": {"gpt_neox.embed_in.weight": "../step1/model.safetensors"}}),
        "no file of its directory",
    ),
    "gptq": (configured(quantization_config={"quant_method": "gptq", "bits": 4}), "quant|gptq|optimum"),
    "quantization: text": (configured(quantization_config="yes"), "to_dict"),
    "attention: not installed": (configured(_attn_implementation="flash_attention_2"), "_attn_implementation"),
    "attention: unknown": (configured(attn_implementation="nonsense"), "attn_implementation = 'nonsense'"),
    "attention: of the hub": (configured(attn_implementation="kernels-community/flash-attn2"), "fetch from the hub"),
    "attention: of a part": (configured(attn_implementation={"text_config": "an/attention"}), "'an/attention'"),
    "no width": (configured(hidden_size=None), "hidden_size"),
    "layers in words": (configured(num_hidden_layers="six"), "num_hidden_layers"),
    "no heads": (configured(num_attention_heads=0), ""),
    "negative heads": (configured(num_attention_heads=-4), ""),
    "unknown activation": (configured(hidden_act="nonsense"), "nonsense"),
    "activation: half a character": (configured(hidden_act="\ud800"), r"\\ud800"),
    "activation: control characters": (configured(hidden_act="a\nb\x1b[31m"), r"a b\\x1b\[31m|\\n"),
    "unknown rope": (configured(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}), ""),
    "unknown dtype": (configured(dtype="float7", torch_dtype="float7"), "float7"),
    "configuration: a list": (replaced("config.json", "[]"), "config"),
    "configuration: garbled": (replaced("config.json", '{"model_type": "gpt_neox"'), "config"),
    "configuration: no text": (replaced("config.json", b"\xff\xfe\x00"), "config"),
    "unknown architecture": (configured(model_type="nonsense"), "nonsense"),
    "architecture: a number": (configured(model_type=7), ""),
    "tokenizer: garbled": (replaced("tokenizer.json", "{"), "tokenizer"),
    "tokenizer: a list": (replaced("tokenizer.json", "[]"), "tokenizer"),
    "tokenizer: empty": (replaced("tokenizer.json", "{}"), "tokenizer"),
    "tokenizer: configuration a list": (replaced("tokenizer_config.json", "[]"), "tokenizer"),
    "tokenizer: a panic when it is read": (
        tokenized(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "a library panicked",
    ),
    "tokenizer: a panic when it is used": (
        tokenized(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "xx"}),
        "a library panicked",
    ),
    "scores: NUL": (replaced("scores.json", json.dumps({"lo\0ss": 1.0})), "scores.json"),
    "scores: a surrogate": (replaced("scores.json", '{"\\ud800": 1.0}'), "scores.json"),
    "scores: a name without end": (replaced("scores.json", json.dumps({"x" * 10**6: 1.0})), "1,000,000 characters"),
    "scores: a number without end": (replaced("scores.json", '{"a": 1' + "0" * 400 + "}"), "scores.json"),
    "scores: nested": (replaced("scores.json", "[" * 100_000), "scores.json"),
    "scores: a list": (replaced("scores.json", "[1]"), "scores.json"),
    "context": (configured(max_position_embeddings=1), "tokens"),
    "vocabulary": (smaller_vocabulary, "vocabulary"),
    "fewer blocks": (fewer_blocks, "number of blocks"),
    "too many layers": (configured(num_hidden_layers=1_000_000), "num_hidden_layers"),
    "too many layers in a part": (configured(text_config={"num_hidden_layers": 10**8}), "num_hidden_layers"),
    "too many labels": (configured(num_labels=10**9), "num_labels"),
    "a table too large": (
        configured(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}),
        "other values",
    ),
    "too wide": (configured(hidden_size=1 << 30, num_attention_heads=1), ""),
    "too many words": (configured(vocab_size=10**12), "parameters"),
    "too wide within": (configured(intermediate_size=10**10), "parameters"),
    "weights: damaged": (replaced("model.safetensors", b"\xff" * 20_000), "safetensors|header|Header"),
    "weights: empty": (replaced("model.safetensors", b""), "hold 0 bytes"),
    "weights: infinite": (infinite_weights, "infinite"),
}
