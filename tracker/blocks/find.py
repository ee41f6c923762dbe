"""Find the residual blocks of a transformer.

A block maps the hidden state X^{l-1} to X^l, both (n, d). `find_blocks` uses, in this order: the blocks that the caller names;
the list that a Hugging Face model's config declares (`tracker.model.huggingface`); the only run of modules of one class that each
contain an attention module (`towers`). It does not guess between several towers or stages. If no attention is recognised by name,
the only list of modules of one class (`lists`), which a forward pass has to confirm (`behaviour`). Blocks that are no modules are
named by their boundaries (`tracker.model.boundaries`).
"""

from collections.abc import Iterable, Sequence, Sized
from dataclasses import replace
from reprlib import repr as shortened
from typing import Any

from torch import nn

from tracker.blocks.lists import (
    candidate_runs,
    classes_of,
    mixed_run,
    nothing_found,
    outermost,
    top_level,
)
from tracker.blocks.towers import (
    ModuleRun,
    class_token_parameter,
    find_runs,
    is_class_attention,
    nested,
    norms_around,
    proposals,
    related,
)
from tracker.common.errors import UsageError
from tracker.model.boundaries import Boundary, chain, read_fixed, read_spans
from tracker.model.description import Blocks, Named
from tracker.model.huggingface import (
    declared_blocks,
    find_unembedding,
    in_text_tower,
    is_encoder_decoder,
)
from tracker.model.proposals import BlocksNotFound
from tracker.model.wrappers import innermost, name_without_wrappers, names_by_id, unwrap


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
            raise UsageError(
                "blocks is a result of find_blocks; give `fixed` to the call that made it"
            )
        return blocks
    check_model(model)
    tree = unwrap(model)
    runs = find_runs(tree)
    spans = [
        (_named_boundary(model, start), _named_boundary(model, end))
        for start, end in read_spans(blocks) or ()
    ]
    if spans:
        found = (
            [boundary.module for span in spans for boundary in span],
            "boundaries named by the caller",
            (),
        )
    elif blocks is not None:
        found = _named(model, tree, blocks), "named by the caller", ()  # type: ignore[arg-type]
    else:
        found = _recognised(tree, runs) or _guessed(tree)
    names, _, assumed = found
    places = [_named_boundary(model, place) for place in read_fixed(fixed)]
    # Fixed tensors make spans of the blocks, and a forward pass confirms guesses of modules alone.
    if places and ("attention" in assumed or assumed == MIXED):
        why = "their classes differ" if assumed == MIXED else "no attention is recognised in them"
        raise UsageError(
            f"the blocks {names[0]} to {names[-1]} are a guess, as {why}; name the blocks, too: "
            "blocks=find_blocks(model, BLOCKS, fixed=...)"
        )
    result = describe(tree, runs, *found)
    if spans:
        result = replace(result, batch_first=_is_batch_first(tree))
        # The last boundary may be its input
        if "norm" in type(tree.get_submodule(names[-1])).__name__.lower():
            result = replace(result, final_norms=(names[-1], *result.final_norms))
    if final_norm is not None:
        result = replace(result, final_norms=(_name(model, final_norm),))
    if unembedding is not None:
        result = replace(result, unembedding=_name(model, unembedding) or result.unembedding)
    if batch_first is not None:
        result = replace(result, batch_first=batch_first)
    if class_token is not None:
        result = replace(result, class_token=class_token, class_token_parameter=None)
    return result.between_boundaries(spans or chain(names), places) if spans or places else result


def describe(
    tree: nn.Module,
    runs: Sequence[ModuleRun],
    names: Sequence[str],
    found_by: str,
    assumed: tuple[str, ...],
) -> Blocks:
    """Return the description of a model by the names of its blocks.

    Args:
        tree: the model without wrappers.
        runs: what `find_runs` returns for it.
        names: of the blocks.
        found_by: how they were found.
        assumed: what a forward pass has to confirm of them.
    """
    of_text = in_text_tower(tree, names[0])
    parameter = None if of_text else class_token_parameter(tree, names, runs)
    return Blocks(
        names=tuple(names),
        found_by=found_by,
        final_norms=tuple(norms_around(tree, names, runs)),
        include_final_norm=of_text,
        unembedding=find_unembedding(tree, names[0]),
        class_token=None if parameter is None else 0,
        class_token_parameter=parameter,
        batch_first=_is_batch_first(tree.get_submodule(names[0])),
        assumed=assumed,
    )


def recognised_blocks(tree: nn.Module, mixed_lists: bool = True) -> Blocks | None:
    """Return the blocks of a model without wrappers that its config declares, or in which modules are recognised as attention by
    their names; None if there are none.

    Args:
        mixed_lists: whether a list of several classes may be assumed to be all blocks, `MIXED`.

    Raises:
        BlocksNotFound: if there are several lists of them.
    """
    runs = find_runs(tree)
    found = _recognised(tree, runs, mixed_lists)
    return None if found is None else describe(tree, runs, *found)


def _is_batch_first(module: nn.Module) -> bool:
    return all(
        part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention)
    )


def check_model(model: Any) -> None:
    """Raise UsageError if the model is not an nn.Module, such as the name of one."""
    if not isinstance(model, nn.Module):
        name = model if isinstance(model, str) else "gpt2"
        raise UsageError(
            f"model is {shortened(model)} ({type(model).__name__}); give the loaded model, such as "
            f"AutoModelForCausalLM.from_pretrained({name!r})"
        )


def _named_boundary(model: nn.Module, boundary: Boundary) -> Boundary:
    return replace(boundary, module=_name(model, boundary.module))


def _named(model: nn.Module, tree: nn.Module, blocks: str | Sequence[str | nn.Module]) -> list[str]:
    """Return the names in `tree`, the model without wrappers, of the blocks that the caller names."""
    if isinstance(blocks, str):
        container = _name(model, blocks)
        blocks = [
            f"{container}.{name}".lstrip(".")
            for name, _ in tree.get_submodule(container).named_children()
        ]
        if not blocks:
            raise UsageError(
                "the container named as `blocks` holds no modules; name the list that holds the blocks"
            )
    # An nn.ModuleList is no Sequence.
    listed = list(blocks) if isinstance(blocks, Sized) and isinstance(blocks, Iterable) else [None]
    if not all(isinstance(block, (str, nn.Module)) for block in listed):
        raise UsageError(
            f"blocks={shortened(blocks)}; give the name of the list that holds the blocks ('path.to.list'), a list of modules or "
            "of their names, the boundaries between blocks (['input of A', ..., 'output of Z']), or a result of find_blocks"
        )
    if len(blocks) == 0:
        raise UsageError(
            "`blocks` names no module; give the blocks in order of depth, or omit it to have them found"
        )
    known = names_by_id(model)
    names = []
    for block in blocks:
        if isinstance(block, str):
            names.append(_name(model, block))
        elif id(innermost(block)) in known:
            names.append(known[id(innermost(block))])
        else:
            raise UsageError(
                f"a module named as a block ({type(block).__name__}) is not part of the model"
            )
    # By identity: a module may be registered under several names.
    if len({id(tree.get_submodule(name)) for name in names}) < len(names):
        raise UsageError(
            "`blocks` names a module twice; name each once, in order of depth: repeated calls are found"
        )
    return names


def _name(model: nn.Module, path: str) -> str:
    name = name_without_wrappers(model, path)
    if name is None:
        raise UsageError(
            f"the model has no module named {path!r}; its parts are {top_level(unwrap(model))}"
        )
    return name


# The blocks' names, how they were found, and what was assumed
Found = tuple[Sequence[str], str, tuple[str, ...]]
CHECKED = "; assumed, and checked when measuring"
MIXED = ("blocks", "list")  # what is assumed of the modules of a list that are of several classes


def _recognised(
    model: nn.Module, runs: Sequence[ModuleRun], mixed_lists: bool = True
) -> Found | None:
    """Return the declared blocks, or the list of blocks with attention; None if no config and no name of a module shows them.

    Args:
        mixed_lists: whether a list of several classes may be assumed to be all blocks.
    """
    declared = declared_blocks(model)
    if declared is not None:
        # Other lists with attention may be towers that come first, and stages inside the blocks may be the blocks.
        others = [run for run in runs if not related(run, declared.names)]
        stages = [run for run in runs if nested(run, declared.names)]
        if not others and not stages:
            return declared.names, str(declared), ("chain",)
        prefix = next(
            f"{name}." for name, module in model.named_modules() if module is declared.owner
        ).lstrip(".")
        within = all(run.container.startswith(prefix) for run in others)
        if within and declared.tower:
            tower_class = type(model.get_submodule(declared.tower)).__name__
            towers = ", ".join(
                dict.fromkeys(f"{run.tower or run.container} ({run.block_class})" for run in others)
            )
            return (
                declared.names,
                f"the text tower {declared.tower} ({tower_class}), which {declared.role}; not {towers}",
                ("blocks",),
            )
        text = (
            in_text_tower(model, declared.names[0])
            or find_unembedding(model, declared.names[0]) is not None
        )
        if within and text and not is_encoder_decoder(declared.owner):
            return declared.names, str(declared), ("blocks",)
    trunks = [run for run in runs if not is_class_attention(run)]
    mixed = mixed_run(model, trunks) if mixed_lists else None
    if mixed is not None:
        return mixed.names, f"a list of modules of several classes, {mixed}{CHECKED}", MIXED
    if not any(run.depth > 1 for run in runs):
        return None if declared is None else _guessed(model)
    if len(trunks) == 1 and trunks[0].depth > 1 and "/" not in trunks[0].block_class:
        (run,), after = trunks, [run for run in runs if is_class_attention(run)]
        how = f"the only list of blocks with attention, {run}"
        if after:
            how = f"{run}, before the class attention of {after[0].container} ({after[0]})"
        return run.names, how, ("blocks",)
    depths = {run.depth for run in runs}
    number = f"{len(runs)} list{'s' if len(runs) > 1 else ''}"
    lists = f"{number} of {depths.pop()} blocks" if len(depths) == 1 else f"{number} of blocks"
    paths = ", ".join(repr(run.container) for run in runs)
    why = (
        "they may be towers, stages or parts of one chain"
        if len(runs) > 1
        else "its modules are of several classes"
    )
    message = f"{lists} found ({paths}) in {type(model).__name__}, and {why}."
    raise BlocksNotFound(message, proposals(model, runs))


def _guessed(model: nn.Module) -> Found:
    """Return the only list of modules that may be blocks."""
    candidates = candidate_runs(model)
    (run, *others) = outermost(candidates) or (None,)
    if run is None or others:
        raise nothing_found(model, candidates)
    how = f"the only list of modules of {classes_of(run)}, {run}{CHECKED}"
    return run.names, how, ("blocks", "attention")
