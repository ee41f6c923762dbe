"""What a Hugging Face model says of itself: where its blocks are, its token embedding, its unembedding."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from tracker.blocks.towers import unwrap


@dataclass(frozen=True)
class Declared:
    """A list of as many blocks as the config says; of the text tower, where the config describes several towers."""

    owner: nn.Module
    container: str
    names: tuple[str, ...]
    tower: str = ""  # the text tower, where there are several
    gives: str = ""  # how it reaches the model's output

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.base_model, a list of config.num_hidden_layers = {len(self.names)}"


def huggingface_owner(model: nn.Module, block: str | None = None) -> nn.Module | None:
    """The outermost Hugging Face model in `model` (itself, or wrapped in a module of one's own) that holds `block`."""
    return next(iter(_owners(model, block)), None)


def token_embedding(model: nn.Module) -> nn.Embedding | None:
    """The table a Hugging Face model looks its token ids up in; None for models that read something else."""
    try:
        embed = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # not a Hugging Face model, or one that has no such table
        return None
    return embed if isinstance(embed, nn.Embedding) else None


def unembedding(model: nn.Module, block: str) -> str | None:
    """The module that maps this block's tower's hidden states to logits, by name."""
    owner = huggingface_owner(model, block)
    if owner is None or (token_embedding(owner) is not None and not in_text_tower(model, block)):
        return None
    if is_encoder_decoder(owner) and _encodes(owner, model, block):
        return None
    head = owner.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, nn.ModuleList):  # several, one for each codebook
        return None
    return next((name for name, module in model.named_modules() if head is not None and module is head), None)


def in_text_tower(model: nn.Module, block: str) -> bool:
    """Whether the block is of a Hugging Face model, or of that tower of it, that reads token ids."""
    owners = _owners(model, block)
    towers = _text_towers(owners[0]) if owners else []
    if towers and not any(inner is tower for inner in owners for tower in towers):
        return False
    for inner in reversed(owners):  # the innermost that says what it reads: a vision tower has an embedding of its own
        try:
            embed = inner.get_input_embeddings()  # type: ignore[operator]
            tables = embed if isinstance(embed, nn.ModuleList) and len(embed) else [embed]  # one for each codebook
            return all(isinstance(table, nn.Embedding) for table in tables)
        except (AttributeError, NotImplementedError):
            continue
    return any(isinstance(getattr(inner.config, "vocab_size", None), int) for inner in owners)


def is_encoder_decoder(owner: nn.Module) -> bool:
    """Whether the model holds an encoder and a decoder."""
    return bool(getattr(owner.config, "is_encoder_decoder", False))


def declared(model: nn.Module) -> Declared | None:
    """The blocks that the outermost Hugging Face model declares; None where its config decides on no one list."""
    owner = huggingface_owner(model)
    if owner is None:
        return None
    config: Any = owner.config
    towers = _text_towers(owner)
    if not towers:
        return _list_of(model, owner, getattr(owner, "base_model", None), getattr(config, "num_hidden_layers", None))
    gives = _reaches(owner)
    if len(towers) > 1 or gives is None or is_encoder_decoder(owner):
        return None
    (tower,) = towers
    found = _list_of(model, owner, tower, getattr(tower.config, "num_hidden_layers", None))
    if found is None:
        return None
    return Declared(owner, found.container, found.names, _name_of(model, tower), gives)


def _owners(model: nn.Module, block: str | None) -> list[nn.Module]:
    """The Hugging Face models in `model` that hold the block, the outermost first."""
    return [
        module
        for name, module in unwrap(model).named_modules()
        if (block is None or name == "" or block.startswith(f"{name}."))
        and hasattr(module, "config")
        and hasattr(module, "get_input_embeddings")
    ]


def _text_towers(owner: nn.Module) -> list[nn.Module]:
    """The parts of a model with several towers that its config's section on text describes; none for other models."""
    config: Any = owner.config
    section = getattr(config, "text_config", None)
    if section is None or isinstance(section, dict) or type(section) is type(config):
        return []
    towers: list[nn.Module] = []
    for _, module in owner.named_modules():
        if type(getattr(module, "config", None)) is type(section) and hasattr(module, "get_input_embeddings"):
            if not any(module is part for tower in towers for part in tower.modules()):
                towers.append(module)
    return towers


def _reaches(owner: nn.Module) -> str | None:
    """How the text tower of a vision-language model reaches its output; None where towers stand side by side."""
    if owner.get_output_embeddings() is not None:  # type: ignore[operator]
        return "gives the logits"
    if "past_key_values" in inspect.signature(owner.forward).parameters:
        return "gives the last hidden state"
    return None


def _list_of(model: nn.Module, owner: nn.Module, part: Any, depth: int | None) -> Declared | None:
    if not isinstance(part, nn.Module) or not isinstance(depth, int) or depth < 1:
        return None
    classes = set(getattr(owner, "_no_split_modules", None) or ())
    lists = [m for m in part.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    chosen = [m for m in lists if type(unwrap(m[0])).__name__ in classes] or lists
    if len(chosen) != 1:
        return None
    container = _name_of(model, chosen[0])
    return Declared(owner, container, tuple(f"{container}.{i}" for i in range(depth)))


def _encodes(owner: nn.Module, model: nn.Module, block: str) -> bool:
    """Whether a block of an encoder-decoder is of its encoder."""
    decoder = owner.get_decoder()  # type: ignore[operator]
    return not isinstance(decoder, nn.Module) or not any(
        part is model.get_submodule(block) for part in decoder.modules()
    )


def _name_of(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)
