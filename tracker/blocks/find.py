"""Find the residual blocks of a transformer.

A block maps the hidden state X^{l-1} to X^l, both (n, d). `find_blocks` uses, in this order: the blocks that the caller names;
the list that a Hugging Face model's config declares (`huggingface`); the only run of modules of one class that each contain
an attention module (`towers`). It does not guess between several towers or stages. If no attention is recognised by name, the
only list of modules of one class (`candidate_runs`), which a forward pass has to confirm (`tracker.capture.confirm`). Blocks that
are no modules are named by their boundaries (`boundaries`).

Where no attention module is recognised by its name, a candidate is a run of consecutive modules of one class, each with at
least two matrices outside convolutions and recurrent layers: the entries of a ModuleList, Sequential or ModuleDict, or the
numbered attributes of a module (block0, block1, ...). Stacks of MLPs are candidates too: `tracker.capture.confirm` tells blocks
from them in a forward pass.

The tree is read through wrappers: modules that hold another one and do nothing of their own in its forward pass. The name of a
module is always its name in the tree without wrappers, at whatever depth they stand. That is the tree of a replica, so a name
found in the model is valid there.
"""

import re
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from reprlib import repr as shortened
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from tracker.blocks.boundaries import (
    Boundary,
    Span,
    chain,
    is_list_of_lists,
    propose_boundaries,
    read_fixed,
    read_spans,
)
from tracker.blocks.huggingface import (
    declared_blocks,
    huggingface_owner,
    in_text_tower,
    is_encoder_decoder,
    token_embedding,
)
from tracker.blocks.huggingface import unembedding as find_unembedding
from tracker.blocks.towers import (
    BlocksNotFound,
    ModuleRun,
    Proposal,
    class_token_parameter,
    find_runs,
    has_matrices,
    is_class_attention,
    nested,
    norms_around,
    proposals,
    related,
)
from tracker.common.errors import UsageError

# The child that a wrapper holds: torch.compile, activation checkpointing, Lightning Fabric.
_HELD = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
_HOLDERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)  # their child is `module`


def innermost(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers, or the module itself; its parts may be wrapped."""
    return path_inside(module)[1]


def path_inside(module: nn.Module) -> tuple[list[str], nn.Module]:
    """Return the attributes that lead through a module's wrappers, the outermost first, and the module inside them."""
    steps = []
    while (held := _held(module)) is not None:
        step, module = held
        steps.append(step)
    return steps, module


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without wrappers at any depth: the model itself if it has none, else shallow copies of its modules.

    A copy shares everything with its original except the table of its children. It is for reading, and its hooks are its
    original's; the model that runs is the original.
    """
    copies: dict[int, nn.Module] = {}  # by id of the original: a module in two places stays one

    def copy(module: nn.Module) -> nn.Module:
        module = innermost(module)
        if id(module) not in copies:
            new = copies[id(module)] = object.__new__(type(module))
            children: dict[str, nn.Module | None] = {}
            new.__dict__ = vars(module) | {"_modules": children}
            children.update((key, None if child is None else copy(child)) for key, child in module._modules.items())
        return copies[id(module)]

    return model if all(_held(module) is None for module in model.modules()) else copy(model)


def names_by_id(model: nn.Module) -> dict[int, str]:
    """Return the name of every module of the model, by its id; a wrapper has the name of what it holds."""
    names: dict[int, str] = {}

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in names:
            return
        names[id(module)] = name
        if (held := _held(module)) is not None:
            visit(name, held[1])
            return
        for key, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return names


def name_without_wrappers(model: nn.Module, path: str) -> str | None:
    """Return the name of the module that a path names, with the wrappers' own steps in it or without; None if there is none."""
    if _at(unwrap(model), path) is not None:
        return path
    module: nn.Module | None = model
    kept = []
    for step in path.split("."):
        while module is not None and (held := _held(module)) is not None:
            attribute, module = held
            if attribute == step:
                break
        else:
            module = None if module is None else module._modules.get(step)
            kept.append(step)
    return None if module is None else ".".join(kept)


def _at(model: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = model
    for step in path.split(".") if path else ():
        module = None if module is None else module._modules.get(step)
    return module


def _held(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the module that a wrapper holds, after the attribute that is it; None for a module that is no wrapper.

    TransformerLens's TransformerBridge is a wrapper too: it keeps the model that its forward calls outside its own tree, and puts
    its hook points into that model.
    """
    if "original_model" in vars(module) and "TransformerBridge" in {c.__name__ for c in type(module).__mro__}:
        return "original_model", vars(module)["original_model"]
    attribute = "module" if isinstance(module, _HOLDERS) else next((key for key in _HELD if key in module._modules), "")
    held = module._modules.get(attribute)
    return None if held is None else (attribute, held)


__all__ = ["Blocks", "Named", "UsageError", "find_blocks", "huggingface_owner", "token_embedding", "unwrap"]


Named = str | Sequence[str | nn.Module | tuple[str, str]]  # blocks as a caller names them


@dataclass(frozen=True)
class Blocks:
    """A model's residual blocks, final norm, unembedding and class token, by name.

    Names are qualified names within the model without wrappers, such as those of DDP and `torch.compile`.
    """

    names: tuple[str, ...]
    found_by: str
    final_norms: tuple[str, ...] = ()  # candidates; the recorded pass shows which one takes the last block's output
    include_final_norm: bool | None = (
        None  # what `final_norm="auto"` means; None: included if logits of each token follow
    )
    unembedding: str | None = None  # the module that maps a hidden state to logits over a vocabulary
    class_token: int | None = None  # position of the token that the classifier reads, if it has one
    batch_first: bool = True
    assumed: tuple[str, ...] = ()  # which of "blocks", "attention" and "class token" a forward pass has to confirm
    spans: tuple[Span, ...] = ()  # blocks that are no modules; `names` then names their boundaries
    fixed: tuple[Boundary, ...] = ()  # tensors that keep their recorded values while a span is linearized

    def __str__(self) -> str:
        layout = "batch first" if self.batch_first else "sequence first"
        norm = " or ".join(self.final_norms) or "none"
        token = "none" if self.class_token is None else f"position {self.class_token}"
        included = "included by default" if self.include_final_norm else "excluded by default"
        head = self.unembedding or "none"
        if self.include_final_norm is None:
            included = "included by default if measuring finds that logits over a vocabulary follow it"
            head = self.unembedding or "the module that gives these logits, if measuring finds one"
        first, last = (self.spans[0][0], self.spans[-1][1]) if self.spans else (self.names[0], self.names[-1])
        fixed = f"fixed: {', '.join(map(str, self.fixed))}; " if self.fixed else ""
        return (
            f"{len(self.names)} blocks, {first} to {last} ({self.found_by}); {fixed}{layout}; "
            f"final norm: {norm} ({included}); unembedding: {head}; class token: {token}"
        )

    def between_boundaries(self, spans: Sequence[Span], fixed: Sequence[Boundary] = ()) -> "Blocks":
        """Return the same with spans as blocks. Recording them checks more than what was assumed of modules."""
        return replace(
            self,
            names=tuple(f"{start} to {end}" for start, end in spans),
            spans=tuple(spans),
            fixed=tuple(dict.fromkeys(fixed)),
            assumed=(),
        )


def find_blocks(
    model: nn.Module,
    blocks: Named | Blocks | None = None,
    *,
    fixed: str | Sequence[str] = (),
    final_norm: str | None = None,
    unembedding: str | None = None,
    class_token: int | None = None,
    batch_first: bool | None = None,
) -> Blocks:
    """Find the residual blocks of `model`, in order of depth; print the result to read what was found and assumed.

    Args:
        model: any transformer.
        blocks: names the blocks instead of finding them: the qualified name of their container, or a list of modules or
            their names; the steps of wrappers in a name (_orig_mod, module) may be left out. For blocks that are no modules,
            the start and end of each, [("input of A", "output of B"), ...], or the L + 1 boundaries in order of depth,
            ["input of A", "input of C", ..., "output of Z"].
        fixed: where the tensors are that the model mixes into the hidden state between blocks, "output of NAME" or "input of
            NAME", one or a list. What is computed from them stays at its recorded value while a block is linearized. Blocks
            that are modules become spans: what is mixed in before a block belongs to it. A fixed tensor is computed from the
            inputs, without passing through a block, or is the hidden state at a boundary, held in the spans after the one
            that it starts.
        final_norm: the qualified name of the norm that takes the last block's output.
        unembedding: the qualified name of the module that maps a hidden state to logits over the vocabulary.
        class_token: the position of the token that a classifier reads.
        batch_first: whether hidden states are (batch, tokens, width) or (tokens, batch, width).

    Raises:
        UsageError: if `model` is no module, no blocks are found, several containers fit equally well (the message proposes
            lines, which have not been tried), or a named module does not exist.
    """
    if isinstance(blocks, Blocks):
        if fixed:
            raise UsageError("blocks is a result of find_blocks; give `fixed` to the call that made it")
        return blocks
    check_model(model)
    wrapped, model = model, unwrap(model)
    runs = find_runs(model)
    spans = [
        (_named_boundary(wrapped, start), _named_boundary(wrapped, end)) for start, end in read_spans(blocks) or ()
    ]
    if spans:
        names, found_by, assumed = [b.module for span in spans for b in span], "boundaries named by the caller", ()
    elif blocks is not None:
        names, found_by, assumed = _named(wrapped, model, blocks), "named by the caller", ()  # type: ignore[arg-type]
    else:
        names, found_by, assumed = _found(model, runs)
    places = [_named_boundary(wrapped, place) for place in read_fixed(fixed)]
    if places and "attention" in assumed:
        raise UsageError(
            f"the blocks {names[0]} to {names[-1]} are a guess, as no attention is recognised in them; name the blocks, too: "
            "blocks=find_blocks(model, BLOCKS, fixed=...)"
        )
    language = in_text_tower(model, names[0])
    token = class_token
    if token is None and not language and class_token_parameter(model, names, runs) is not None:
        token = 0
    final_norm, unembedding = (None if path is None else _name(wrapped, path) for path in (final_norm, unembedding))
    if batch_first is None:
        first = model if spans else model.get_submodule(names[0])
        attentions = (m for m in first.modules() if isinstance(m, nn.MultiheadAttention))
        batch_first = all(attention.batch_first for attention in attentions)
    norms = norms_around(model, names, runs)
    if spans and "norm" in type(model.get_submodule(names[-1])).__name__.lower():  # the last boundary may be its input
        norms = [names[-1], *norms]
    result = Blocks(
        names=tuple(names),
        found_by=found_by,
        final_norms=tuple(norms) if final_norm is None else (final_norm,),
        include_final_norm=None if huggingface_owner(model, names[0]) is None else language,
        unembedding=unembedding or find_unembedding(model, names[0]),
        class_token=token,
        batch_first=batch_first,
        assumed=assumed + ("class token",) * (token is not None and class_token is None),
    )
    if not spans and not places:
        return result
    return result.between_boundaries(spans or chain(names), places)


def check_model(model: Any) -> None:
    """Raise UsageError if the model is not an nn.Module, such as the name of one."""
    if not isinstance(model, nn.Module):
        name = model if isinstance(model, str) else "gpt2"
        raise UsageError(
            f"model is {shortened(model)} ({type(model).__name__}); give the loaded model, such as "
            f"AutoModelForCausalLM.from_pretrained({name!r})"
        )


def recognises_blocks(model: nn.Module) -> bool:
    """Whether the config declares the blocks, or modules are recognised as attention by their names."""
    model = unwrap(model)
    return declared_blocks(model) is not None or any(run.depth > 1 for run in find_runs(model))


def _named_boundary(model: nn.Module, boundary: Boundary) -> Boundary:
    return replace(boundary, module=_name(model, boundary.module))


def _named(wrapped: nn.Module, model: nn.Module, blocks: str | Sequence[str | nn.Module]) -> list[str]:
    """Return the names in `model`, the given model without wrappers, of the blocks that the caller names."""
    if isinstance(blocks, str):
        container = _name(wrapped, blocks)
        blocks = [f"{container}.{name}".lstrip(".") for name, _ in model.get_submodule(container).named_children()]
        if not blocks:
            raise UsageError("the container named as `blocks` holds no modules; name the list that holds the blocks")
    # An nn.ModuleList is no Sequence.
    listed = list(blocks) if isinstance(blocks, Sized) and isinstance(blocks, Iterable) else [None]
    if not all(isinstance(block, (str, nn.Module)) for block in listed):
        raise UsageError(
            f"blocks={shortened(blocks)}; give the name of the list that holds the blocks ('path.to.list'), a list of modules or "
            "of their names, the boundaries between blocks (['input of A', ..., 'output of Z']), or a result of find_blocks"
        )
    if len(blocks) == 0:
        raise UsageError("`blocks` names no module; give the blocks in order of depth, or omit it to have them found")
    known = names_by_id(wrapped)
    names = []
    for block in blocks:
        if isinstance(block, str):
            names.append(_name(wrapped, block))
        elif id(innermost(block)) in known:
            names.append(known[id(innermost(block))])
        else:
            raise UsageError(f"a module named as a block ({type(block).__name__}) is not part of the model")
    if len({id(model.get_submodule(name)) for name in names}) < len(names):
        raise UsageError("`blocks` names a module twice; name each once, in order of depth: repeated calls are found")
    return names


def _name(model: nn.Module, path: str) -> str:
    name = name_without_wrappers(model, path)
    if name is None:
        raise UsageError(f"the model has no module named {path!r}; its parts are {_top_level(unwrap(model))}")
    return name


def _found(model: nn.Module, runs: Sequence[ModuleRun]) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the blocks' names, how they were found, and what was assumed: the tower, or that they contain attention."""
    declared = declared_blocks(model)
    if declared is not None:
        others = [run for run in runs if not related(run, declared.names)]
        stages = [run for run in runs if nested(run, declared.names)]
        if not others and not stages:
            return declared.names, str(declared), ()
        prefix = next(f"{name}." for name, module in model.named_modules() if module is declared.owner).lstrip(".")
        within = all(run.container.startswith(prefix) for run in others)
        if within and declared.tower:
            tower_class = type(model.get_submodule(declared.tower)).__name__
            towers = ", ".join(dict.fromkeys(f"{run.tower or run.container} ({run.block_class})" for run in others))
            return (
                declared.names,
                f"the text tower {declared.tower} ({tower_class}), which {declared.role}; not {towers}",
                ("blocks",),
            )
        text = in_text_tower(model, declared.names[0]) or find_unembedding(model, declared.names[0]) is not None
        if within and text and not is_encoder_decoder(declared.owner):
            return declared.names, str(declared), ("blocks",)
    if not any(run.depth > 1 for run in runs):
        candidates = candidate_runs(model)
        (run, *others) = outermost(candidates) or (None,)
        if run is None or others:
            raise nothing_found(model, candidates)
        how = f"the only list of modules of one class, {run}; assumed, and checked when measuring"
        return run.names, how, ("blocks", "attention")
    trunks = [run for run in runs if not is_class_attention(run)]
    if len(trunks) == 1 and trunks[0].depth > 1 and "/" not in trunks[0].block_class:
        (run,), after = trunks, [run for run in runs if is_class_attention(run)]
        if not after:
            return run.names, f"the only list of blocks with attention, {run}", ("blocks",)
        return run.names, f"{run}, before the class attention of {after[0].container} ({after[0]})", ("blocks",)
    raise _ambiguity(model, runs)


def _ambiguity(model: nn.Module, runs: Sequence[ModuleRun]) -> BlocksNotFound:
    depths = {run.depth for run in runs}
    number = f"{len(runs)} list{'s' if len(runs) > 1 else ''}"
    lists = f"{number} of {depths.pop()} blocks" if len(depths) == 1 else f"{number} of blocks"
    paths = ", ".join(repr(run.container) for run in runs)
    why = "they may be towers, stages or parts of one chain" if len(runs) > 1 else "its modules are of several classes"
    message = f"{lists} found ({paths}) in {type(model).__name__}, and {why}."
    return BlocksNotFound(message, proposals(model, runs))


def _top_level(model: nn.Module) -> str:
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children()) or "none"


RECOGNISED = (
    "A block is recognised by an attention module in it: a class whose name contains 'attention' or 'attn', or an attribute "
    "attn, attention, self_attn or self_attention that contains a Linear. Without such names, a list of modules of one class "
    "is recognised in the forward pass of a measurement: each module takes and returns (batch, tokens, width), takes the "
    "output of the one before it, and its output at one token depends on other tokens."
)
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def candidate_runs(model: nn.Module) -> list[ModuleRun]:
    """Return all candidates, those inside other candidates included, in the order in which the model registers them."""
    return [run for name, module in model.named_modules() for run in _runs_of(name, module)]


def outermost(runs: Sequence[ModuleRun]) -> list[ModuleRun]:
    """Return the runs that are not inside a module of another run."""
    return [run for run in runs if not any(nested(run, other.names) for other in runs)]


def nothing_found(
    model: nn.Module, runs: Sequence[ModuleRun], findings: Sequence[str] | None = None, pairs: Sequence[Proposal] = ()
) -> BlocksNotFound:
    """Return the error for a model without blocks: how they are recognised, which lists were seen, and what may be named.

    Args:
        model: the model that was searched.
        runs: its candidates.
        findings: for each candidate, why a forward pass showed that it is no chain of blocks.
        pairs: blocks that a forward pass suggests.
    """
    seen = [] if runs else [f"The model has no list of such modules; its parts are {_top_level(model)}."]
    if runs and findings is not None:
        lines = "".join(f"\n  {run.where} ({run}): {finding}" for run, finding in zip(runs, findings, strict=True))
        seen.append(f"Its lists of modules of one class are no blocks:{lines}")
    boundaries = propose_boundaries(model)
    if boundaries:
        seen.append("It calls attention and MLP separately, so that no module is a block.")
    elif any(map(is_list_of_lists, model.children())):
        seen.append(
            "It calls attention and MLP separately, so that no module is a block, and the last block may end where the model "
            "returns, which has a name only inside another module: measure a model that contains this one."
        )
    message = "\n".join([f"no residual blocks found in {type(model).__name__}. {RECOGNISED}", *seen])
    return BlocksNotFound(message, [*(proposals(model, runs) if findings is None else pairs), *boundaries])


def _runs_of(container: str, module: nn.Module) -> Iterator[ModuleRun]:
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    stretch: list[tuple[str, nn.Module]] = []
    for name, child in children:
        if stretch and not _follows(module, *stretch[-1], name, child):
            yield from _run(container, stretch, children)
            stretch = []
        stretch.append((name, child))
    yield from _run(container, stretch, children)


def _follows(holder: nn.Module, before: str, first: nn.Module, name: str, second: nn.Module) -> bool:
    """Whether two children that were registered one after the other are of one class and in one list."""
    if type(first) is not type(second):
        return False
    if isinstance(holder, _LISTS):
        return True
    a, b = (re.fullmatch(r"(.*?)(\d+)", entry) for entry in (before, name))
    return a is not None and b is not None and a[1] == b[1] and int(a[2]) + 1 == int(b[2])


def _run(
    container: str, stretch: Sequence[tuple[str, nn.Module]], children: Sequence[tuple[str, nn.Module]]
) -> Iterator[ModuleRun]:
    modules = [child for _, child in stretch]
    if (
        len(modules) < 2
        or isinstance(modules[0], (nn.ModuleList, nn.ModuleDict))
        or not all(map(has_matrices, modules))
    ):
        return
    prefix = f"{container}." if container else ""
    first = {id(child): name for name, child in reversed(stretch)}  # a module may be in a list several times
    names = tuple(f"{prefix}{name}" for name, child in stretch if first[id(child)] == name)
    yield ModuleRun(container, names, type(modules[0]).__name__, len(stretch) == len(children), len(stretch))
