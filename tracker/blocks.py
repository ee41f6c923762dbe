"""Find the residual blocks of a transformer.

A block maps the hidden state X^{l-1} to X^l, both (n, d). `find_blocks` looks for them in this order: the modules a
caller names; what a Hugging Face model says of itself (the list under `base_model` with `config.num_hidden_layers`
entries); else the longest run of modules of one class that each hold an attention module.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


class UsageError(ValueError):
    """What was asked can't be done with this model or these inputs; the message says what to do instead."""


@dataclass(frozen=True)
class Blocks:
    """Where a model's residual blocks are, and what was assumed about the model around them.

    Names are qualified names within the unwrapped model (no DDP or `torch.compile` wrapper).
    """

    names: tuple[str, ...]
    found_by: str
    final_norms: tuple[str, ...] = ()  # candidates; the forward pass says which one takes the last block's output
    include_final_norm: bool = False  # the convention `final_norm="auto"` stands for
    unembedding: str | None = None  # the module that maps a hidden state to logits over a vocabulary
    class_token: int | None = None  # position of the token a classifier reads, if there is one
    batch_first: bool = True

    def __str__(self) -> str:
        kind = "batch first" if self.batch_first else "sequence first"
        norm = " or ".join(self.final_norms) or "none"
        token = "none" if self.class_token is None else f"position {self.class_token}"
        included = "included" if self.include_final_norm else "excluded"
        return (
            f"{len(self.names)} blocks, {self.names[0]} to {self.names[-1]} ({self.found_by}); {kind}; "
            f"final norm: {norm} ({included} by default); unembedding: {self.unembedding or 'none'}; class token: {token}"
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, DataParallel and DistributedDataParallel wrappers."""
    while True:
        if "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def find_blocks(
    model: nn.Module,
    blocks: "str | Sequence[str | nn.Module] | Blocks | None" = None,
    *,
    final_norm: str | None = None,
    unembedding: str | None = None,
    class_token: int | None = None,
    batch_first: bool | None = None,
) -> Blocks:
    """Find the residual blocks of `model`, in order of depth; print the result to read what was found and assumed.

    Args:
        model: any transformer.
        blocks: to name them yourself: the qualified name of the container, or a list of modules or of their names.
        final_norm: the qualified name of the norm that takes the last block's output.
        unembedding: the qualified name of the module that maps a hidden state to logits over the vocabulary.
        class_token: the position of the token that a classifier reads.
        batch_first: whether hidden states are (batch, tokens, width) or (tokens, batch, width).

    Raises:
        UsageError: where no blocks are found, several containers fit equally well, or a named module is not there.
    """
    if isinstance(blocks, Blocks):
        return blocks
    model = unwrap(model)
    if blocks is not None:
        names, found_by = _named(model, blocks), "named by the caller"
    else:
        names, found_by = _huggingface(model) or _longest_run(model)
    owner = huggingface_owner(model, names[0])
    language = owner is not None and token_embedding(owner) is not None
    for given in (final_norm, unembedding):
        if given is not None:
            _submodule(model, given)
    if batch_first is None:
        attentions = (m for m in model.get_submodule(names[0]).modules() if isinstance(m, nn.MultiheadAttention))
        batch_first = all(attention.batch_first for attention in attentions)
    return Blocks(
        names=tuple(names),
        found_by=found_by,
        final_norms=tuple(_norms_around(model, names)) if final_norm is None else (final_norm,),
        include_final_norm=language,
        unembedding=unembedding or _unembedding(model, owner),
        class_token=class_token if class_token is not None or language else _class_token(model),
        batch_first=batch_first,
    )


def huggingface_owner(model: nn.Module, block: str | None = None) -> nn.Module | None:
    """The outermost Hugging Face model in `model` (itself, or wrapped in a module of one's own) that holds `block`."""
    for name, module in unwrap(model).named_modules():
        holds = block is None or name == "" or block.startswith(f"{name}.")
        if holds and hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            return module
    return None


def _named(model: nn.Module, blocks: str | Sequence[str | nn.Module]) -> list[str]:
    known = {id(unwrap(module)): name for name, module in model.named_modules(remove_duplicate=False)}
    if isinstance(blocks, str):
        container = _submodule(model, blocks)
        blocks = [f"{blocks}.{name}" for name, _ in container.named_children()]
        if not blocks:
            raise UsageError("the container named as `blocks` holds no modules; name the list that holds the blocks")
    if len(blocks) == 0:
        raise UsageError(
            "`blocks` names no module; give the blocks in order of depth, or leave it out to have them found"
        )
    names = []
    for block in blocks:
        module = _submodule(model, block) if isinstance(block, str) else block
        if id(unwrap(module)) not in known:
            raise UsageError(f"a module named as a block ({type(module).__name__}) is not part of the model")
        names.append(known[id(unwrap(module))])
    if len(set(names)) < len(names):
        raise UsageError("`blocks` names a module twice; name each once, in order of depth: repeated calls are found")
    return names


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise UsageError(f"the model has no module named {name!r}; its parts are {_top_level(model)}") from error


def _huggingface(model: nn.Module) -> tuple[list[str], str] | None:
    owner = huggingface_owner(model)
    base, depth = getattr(owner, "base_model", None), getattr(getattr(owner, "config", None), "num_hidden_layers", None)
    if not isinstance(base, nn.Module) or depth is None:
        return None
    declared = set(getattr(owner, "_no_split_modules", None) or ())
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    chosen = [m for m in lists if type(unwrap(m[0])).__name__ in declared] or lists
    if len(chosen) != 1:
        return None
    prefix = next(name for name, module in model.named_modules() if module is chosen[0])
    names = [f"{prefix}.{i}" for i in range(depth)]
    return names, f"{type(owner).__name__}.base_model, a list of config.num_hidden_layers = {depth}"


def _longest_run(model: nn.Module) -> tuple[list[str], str]:
    runs = []
    for name, module in model.named_modules():
        children = [unwrap(child) for child in module.children()]
        alike = len({type(child) for child in children}) == 1 and len(children) > 1
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and alike and all(map(_attends, children)):
            runs.append((name, [child for child, _ in module.named_children()], type(children[0]).__name__))
    if not runs:
        raise UsageError(
            f"no residual blocks found in {type(model).__name__}. Looked for: a Hugging Face model's list of "
            "config.num_hidden_layers blocks; a ModuleList or Sequential of two or more modules of one class that each "
            f"hold an attention module. The model's parts are {_top_level(model)}. Name the blocks: "
            "blocks='path.to.list', or a list of modules"
        )
    longest = max(len(children) for _, children, _ in runs)
    runs = [run for run in runs if len(run[1]) == longest]
    if len(runs) > 1:
        paths = ", ".join(repr(name) for name, _, _ in runs)
        raise UsageError(
            f"{len(runs)} lists of {longest} blocks found ({paths}); name the one to measure: blocks={runs[0][0]!r}"
        )
    name, children, cls = runs[0]
    prefix = f"{name}." if name else ""
    return [prefix + child for child in children], f"the longest run of one class with attention, {longest} x {cls}"


def _attends(module: nn.Module) -> bool:
    return any("attention" in type(m).__name__.lower() or "attn" in type(m).__name__.lower() for m in module.modules())


def _norms_around(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Norm layers beside the blocks or beside a module that holds them, nearest first, those after the blocks first."""
    found: list[str] = []
    parts = names[-1].split(".")
    for depth in range(len(parts) - 1, -1, -1):
        holder = model.get_submodule(".".join(parts[:depth]))
        children = list(holder._modules)
        after = children.index(parts[depth])
        for child in children[after + 1 :] + children[:after]:
            name = ".".join([*parts[:depth], child])
            if name not in names and "norm" in type(holder._modules[child]).__name__.lower():
                found.append(name)
    return found


def token_embedding(model: nn.Module) -> nn.Embedding | None:
    """The table a Hugging Face model looks its token ids up in; None for models that read something else."""
    try:
        embed = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # not a Hugging Face model, or one that has no such table
        return None
    return embed if isinstance(embed, nn.Embedding) else None


def _unembedding(model: nn.Module, owner: nn.Module | None) -> str | None:
    head = owner.get_output_embeddings() if owner is not None else None  # type: ignore[operator]
    return next((name for name, module in model.named_modules() if head is not None and module is head), None)


def _class_token(model: nn.Module) -> int | None:
    """0 where an image model has a class token and does not pool over the patches instead."""
    if getattr(model, "global_pool", "token") not in ("token", ""):  # timm
        return None
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()}
    return 0 if names & {"cls_token", "class_token"} else None


def _top_level(model: nn.Module) -> str:
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "none"
