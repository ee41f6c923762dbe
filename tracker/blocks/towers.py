"""What is around the blocks of a model: their tower, its class token, and the norms next to them.

A *tower* is the largest module that contains the blocks and no other run of them: the vision tower of a vision-language model, an
encoder, a stage.
"""

from collections.abc import Sequence

from torch import nn

from tracker.blocks.candidates import (
    Run,
    inside,
    join,
    named_attention,
    related,
    runs_with_attention,
)

_CLASS_TOKENS = {
    "cls_token",
    "class_token",
    "class_embedding",
    "cls_embed",
    "cls_embedding",
    "classification_token",
}


def class_token_parameter(model: nn.Module, names: Sequence[str]) -> str | None:
    """Return the class token's parameter in these blocks' tower; None if the tower has none, or pools over the patches.

    A measurement checks that the token comes first and reaches the output (`tracker.blocks.reachability`).
    """
    # Only modules that contain the blocks: a convolutional stem next to them has its own pooling.
    for part in (model.get_submodule(holder) for holder in _holders(names[0])):
        if getattr(part, "global_pool", "token") not in ("token", ""):  # timm
            return None
        if getattr(part, "pool", None) == "mean":  # vit-pytorch
            return None
        # BEiT and its descendants
        if getattr(getattr(part, "config", None), "use_mean_pooling", False):
            return None
    tower = tower_of(names, runs_with_attention(model))
    for path, part in model.get_submodule(tower).named_modules():
        # An attention pool has a query of such a name, which is not one of the blocks' tokens.
        if not named_attention(type(part).__name__):
            for token, value in part._parameters.items():
                if token in _CLASS_TOKENS and value is not None:
                    return join(join(tower, path) if path else tower, token)
    return None


def tower_of(names: Sequence[str], runs: Sequence[Run]) -> str:
    """Return the path of the largest module that contains the named blocks and none of the other runs."""
    others = [run.container for run in runs if not related(run, names)]
    shared = [
        holder for holder in _holders(names[0]) if all(inside(name, holder) for name in names)
    ]
    alone = (holder for holder in shared if not any(inside(other, holder) for other in others))
    return next(alone, shared[-1])


def norms_around(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return norm layers next to the blocks, or next to a module that contains them: the nearest first, those after the blocks
    before those registered earlier.

    The recorded pass shows which of them takes the last block's output.
    """
    norms: list[str] = []
    for path, child in reversed(list(zip(_holders(names[-1]), names[-1].split("."), strict=True))):
        siblings = list(model.get_submodule(path)._modules.items())
        at = [name for name, _ in siblings].index(child)
        for name, sibling in siblings[at + 1 :] + siblings[:at]:
            if join(path, name) not in names and "norm" in type(sibling).__name__.lower():
                norms.append(join(path, name))
    return norms


def _holders(name: str) -> list[str]:
    """Return the names of the modules that hold this one, the whole model first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]
