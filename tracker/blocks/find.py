"""Find the residual blocks of a transformer.

A block maps the hidden state X^{l-1} to X^l, both (n, d). `find_blocks` looks for them in this order: the modules a
caller names; what a Hugging Face model says of itself (`declared`); else the only run of modules of one class that each
hold an attention module (`towers`). Between several towers or stages no guess is made. Blocks that are no modules are named
by their boundaries (`boundaries`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tracker.blocks.boundaries import Span, read_spans, suggestions
from tracker.blocks.huggingface import declared, huggingface_owner, in_text_tower, is_encoder_decoder, token_embedding
from tracker.blocks.huggingface import unembedding as find_unembedding
from tracker.blocks.towers import (
    Run,
    class_attention,
    class_token_parameter,
    find_runs,
    nested,
    norms_around,
    related,
    unwrap,
)
from tracker.errors import UsageError

__all__ = ["Blocks", "Named", "UsageError", "find_blocks", "huggingface_owner", "token_embedding", "unwrap"]


Named = str | Sequence[str | nn.Module | tuple[str, str]]  # blocks, as a caller names them


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
    assumed: tuple[str, ...] = ()  # of "blocks" and "class token", what the forward pass is to confirm
    spans: tuple[Span, ...] = ()  # of blocks that are no modules; `names` then says where each begins and ends

    def __str__(self) -> str:
        kind = "batch first" if self.batch_first else "sequence first"
        norm = " or ".join(self.final_norms) or "none"
        token = "none" if self.class_token is None else f"position {self.class_token}"
        included = "included" if self.include_final_norm else "excluded"
        first, last = (self.spans[0][0], self.spans[-1][1]) if self.spans else (self.names[0], self.names[-1])
        return (
            f"{len(self.names)} blocks, {first} to {last} ({self.found_by}); {kind}; "
            f"final norm: {norm} ({included} by default); unembedding: {self.unembedding or 'none'}; class token: {token}"
        )


def find_blocks(
    model: nn.Module,
    blocks: Named | Blocks | None = None,
    *,
    final_norm: str | None = None,
    unembedding: str | None = None,
    class_token: int | None = None,
    batch_first: bool | None = None,
) -> Blocks:
    """Find the residual blocks of `model`, in order of depth; print the result to read what was found and assumed.

    Args:
        model: any transformer.
        blocks: to name them yourself: the qualified name of the container, or a list of modules or of their names. Blocks
            that are no modules: [("input of A", "output of B"), ...], where each begins and ends, or their L + 1
            boundaries in order of depth, ["input of A", "input of C", ..., "output of Z"].
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
    runs = find_runs(model)
    spans = read_spans(blocks) or []
    within = [_boundary_module(model, boundary.module) for span in spans for boundary in span]
    if spans:
        names, found_by, guessed = within, "boundaries named by the caller", False
    elif blocks is not None:
        names, found_by, guessed = _named(model, blocks), "named by the caller", False  # type: ignore[arg-type]
    else:
        names, found_by, guessed = _found(model, runs)
    language = in_text_tower(model, names[0])
    token = class_token
    if token is None and not language and class_token_parameter(model, names, runs) is not None:
        token = 0
    for given in (final_norm, unembedding):
        if given is not None:
            _submodule(model, given)
    if batch_first is None:
        first = model if spans else model.get_submodule(names[0])
        attentions = (m for m in first.modules() if isinstance(m, nn.MultiheadAttention))
        batch_first = all(attention.batch_first for attention in attentions)
    norms = norms_around(model, names, runs)
    if spans and "norm" in type(model.get_submodule(names[-1])).__name__.lower():  # the last may end where it begins
        norms = [names[-1], *norms]
    return Blocks(
        names=tuple(f"{start} to {end}" for start, end in spans) or tuple(names),
        found_by=found_by,
        final_norms=tuple(norms) if final_norm is None else (final_norm,),
        include_final_norm=language,
        unembedding=unembedding or find_unembedding(model, names[0]),
        class_token=token,
        batch_first=batch_first,
        assumed=("blocks",) * guessed + ("class token",) * (token is not None and class_token is None and not spans),
        spans=tuple(spans),
    )


def _boundary_module(model: nn.Module, name: str) -> str:
    _submodule(model, name)
    return name


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


def _found(model: nn.Module, runs: Sequence[Run]) -> tuple[tuple[str, ...], str, bool]:
    """The blocks' names, how they were found, and whether the choice between towers rests on the module tree."""
    said = declared(model)
    if said is not None:
        besides = [run for run in runs if not related(run, said.names)]
        stages = [run for run in runs if nested(run, said.names)]
        if not besides and not stages:
            return said.names, str(said), False
        prefix = next(f"{name}." for name, module in model.named_modules() if module is said.owner).lstrip(".")
        within = all(run.container.startswith(prefix) for run in besides)
        if within and said.tower:
            kind = type(model.get_submodule(said.tower)).__name__
            towers = ", ".join(dict.fromkeys(f"{run.tower or run.container} ({run.kind})" for run in besides))
            return said.names, f"the text tower {said.tower} ({kind}), which {said.gives}; not {towers}", True
        text = in_text_tower(model, said.names[0]) or find_unembedding(model, said.names[0]) is not None
        if within and text and not is_encoder_decoder(said.owner):
            return said.names, str(said), True
    if not any(len(run.names) > 1 for run in runs):
        raise UsageError(
            f"no residual blocks found in {type(model).__name__}. Looked for: a Hugging Face model's list of "
            "config.num_hidden_layers blocks; a ModuleList or Sequential of two or more modules of one class that each "
            f"hold an attention module. The model's parts are {_top_level(model)}. {_how_to_name(model)}"
        )
    trunks = [run for run in runs if not class_attention(run)]
    if len(trunks) == 1 and len(trunks[0].names) > 1 and "/" not in trunks[0].kind:
        (run,), after = trunks, [run for run in runs if class_attention(run)]
        if not after:
            return run.names, f"the only list of blocks with attention, {run}", True
        return run.names, f"{run}, before the class attention of {after[0].container} ({after[0]})", True
    raise UsageError(_undecided(model, runs))


def _how_to_name(model: nn.Module) -> str:
    lines = suggestions(model)
    if lines:
        return (
            "Its attention and MLP are called by themselves, so that no module is a block: name the boundaries between "
            f"blocks: {' or '.join(lines)}"
        )
    return (
        "Name the blocks: blocks='path.to.list', or a list of modules, or, where no module is a block, "
        "blocks=[('input of A', 'output of B'), ...]"
    )


def _undecided(model: nn.Module, runs: Sequence[Run]) -> str:
    depths = {len(run.names) for run in runs}
    number = f"{len(runs)} list{'s' if len(runs) > 1 else ''}"
    lists = f"{number} of {depths.pop()} blocks" if len(depths) == 1 else f"{number} of blocks"
    paths = ", ".join(repr(run.container) for run in runs)
    why = (
        "nothing says which of them is meant: blocks of several towers or stages are no one chain"
        if len(runs) > 1
        else "its modules are of several classes"
    )
    lines = "".join(f"\n  {run.line}  # {run}" for run in runs)
    return f"{lists} found ({paths}) in {type(model).__name__}, and {why}. Name the one to measure:{lines}"


def _top_level(model: nn.Module) -> str:
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "none"
