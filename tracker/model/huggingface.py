"""Read what a Hugging Face model declares about itself: its blocks, token embedding, unembedding and towers."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from tracker.model.wrappers import names_by_id


@dataclass(frozen=True)
class DeclaredBlocks:
    """The list of config.num_hidden_layers blocks; the text tower's, if the config describes several towers."""

    owner: nn.Module
    names: tuple[str, ...]  # each once, if a block is in the list several times
    found_by: str
    of_text_tower: bool  # whether there are several


def huggingface_owner(model: nn.Module, block: str | None = None) -> nn.Module | None:
    """Return the outermost Hugging Face model in `model` (itself, or inside the caller's own module) that contains `block`."""
    return next(iter(_owners(model, block)), None)


def token_embedding(model: nn.Module) -> nn.Embedding | None:
    """Return the embedding of a Hugging Face model's token ids; None for models with other inputs."""
    try:
        embed = model.get_input_embeddings()  # type: ignore[operator]
    # Not a Hugging Face model, or one without an embedding
    except (AttributeError, NotImplementedError):
        return None
    return _table(embed)


def find_unembedding(model: nn.Module, block: str) -> str | None:
    """Return the name of the module that maps the hidden states of this block's tower to logits, or None."""
    owner = huggingface_owner(model, block)
    if owner is None or (token_embedding(owner) is not None and not in_text_tower(model, block)):
        return None
    if is_encoder_decoder(owner):
        decoder = owner.get_decoder()  # type: ignore[operator]
        decodes = decoder.modules() if isinstance(decoder, nn.Module) else ()
        if not any(part is model.get_submodule(block) for part in decodes):
            return None
    head = owner.get_output_embeddings()  # type: ignore[operator]
    if isinstance(head, nn.ModuleList):  # one for each codebook
        return None
    return names_by_id(model).get(id(head))


def in_text_tower(model: nn.Module, block: str) -> bool | None:
    """Whether the block belongs to a Hugging Face model, or to a tower of one, that takes token ids; None if to neither."""
    owners = _owners(model, block)
    if not owners:
        return None
    towers = _text_towers(owners[0])
    if towers and not any(inner is tower for inner in owners for tower in towers):
        return False
    # The innermost one that declares its input: a vision tower has its own embedding
    for inner in reversed(owners):
        try:
            embed = inner.get_input_embeddings()  # type: ignore[operator]
            # One for each codebook
            tables = embed if isinstance(embed, nn.ModuleList) and len(embed) else [embed]
            return all(_table(table) is not None for table in tables)
        except (AttributeError, NotImplementedError):
            continue
    return any(isinstance(getattr(inner.config, "vocab_size", None), int) for inner in owners)


def is_encoder_decoder(owner: nn.Module) -> bool:
    """Whether the model has an encoder and a decoder."""
    return bool(getattr(owner.config, "is_encoder_decoder", False))


def declared_blocks(model: nn.Module) -> DeclaredBlocks | None:
    """Return the blocks that the outermost Hugging Face model declares; None if its config does not determine one list."""
    owner = huggingface_owner(model)
    if owner is None:
        return None
    towers, names = _text_towers(owner), names_by_id(model)
    if not towers:
        part, declares = getattr(owner, "base_model", None), owner
        found_by = f"{type(owner).__name__}.base_model"
    else:
        part = declares = towers[0]
        found_by = (
            f"the text tower {names[id(part)]} ({type(part).__name__}), which {_tower_role(owner)}"
        )
        if len(towers) > 1 or _tower_role(owner) is None or is_encoder_decoder(owner):
            return None
    config: Any = declares.config
    depth = getattr(config, "num_hidden_layers", None)
    if not isinstance(part, nn.Module) or not isinstance(depth, int) or depth < 1:
        return None
    classes = set(getattr(owner, "_no_split_modules", None) or ())
    lists = [m for m in part.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    chosen = [m for m in lists if type(m[0]).__name__ in classes] or lists
    if len(chosen) != 1:
        return None
    of_blocks = tuple(f"{names[id(chosen[0])]}.{i}" for i, _ in chosen[0].named_children())
    found_by += f", a list of config.num_hidden_layers = {depth}"
    return DeclaredBlocks(owner, of_blocks, found_by, bool(towers))


def _table(embedding: Any) -> nn.Embedding | None:
    """Return an embedding of ids, also from inside a wrapper without parameters of its own; None for any other module."""
    if not isinstance(embedding, nn.Module):
        return None
    inside = [module for module in embedding.modules() if isinstance(module, nn.Embedding)]
    owned = {id(parameter) for table in inside for parameter in table.parameters()}
    return (
        inside[0]
        if len(inside) == 1 and all(id(p) in owned for p in embedding.parameters())
        else None
    )


def _owners(model: nn.Module, block: str | None) -> list[nn.Module]:
    """Return the Hugging Face models in `model` that contain the block, the outermost first."""
    owners = []
    for name, module in model.named_modules():
        contains = block is None or name == "" or block.startswith(f"{name}.")
        if contains and hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            owners.append(module)
    return owners


def _text_towers(owner: nn.Module) -> list[nn.Module]:
    """Return the parts of a multi-tower model that its config's text section describes; none for other models."""
    config: Any = owner.config
    section = getattr(config, "text_config", None)
    if section is None or isinstance(section, dict) or type(section) is type(config):
        return []
    towers: list[nn.Module] = []
    for _, module in owner.named_modules():
        if type(getattr(module, "config", None)) is type(section) and hasattr(
            module, "get_input_embeddings"
        ):
            if not any(module is part for tower in towers for part in tower.modules()):
                towers.append(module)
    return towers


def _tower_role(owner: nn.Module) -> str | None:
    """Describe how a vision-language model's text tower reaches its output; None for towers in parallel (CLIP)."""
    if owner.get_output_embeddings() is not None:  # type: ignore[operator]
        return "gives the logits"
    # Renamed in transformers 5.24
    if {"cache", "past_key_values"} & set(inspect.signature(owner.forward).parameters):
        return "gives the last hidden state"
    return None
