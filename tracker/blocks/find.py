"""Find the residual blocks of a transformer.

A block maps the hidden state X^{l-1} to X^l, both (n, d). `find_blocks` takes the blocks that the caller names: modules, or
boundaries of blocks that are no modules (`tracker.model.boundaries`). Else `choose` takes, in the order of trust:

1. the list that a Hugging Face model's config declares (`tracker.model.huggingface`);
2. a list of modules of several classes in which all attention is: a guess;
3. the only run of modules of one class that each contain an attention module (`candidates`);
4. if no attention is recognised by name, a list of modules that may be blocks: a guess.

A forward pass judges guesses (`judge`). Between several towers or stages nothing is guessed: the error proposes each.
"""

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import replace
from reprlib import repr as shortened
from typing import Any

from torch import nn

from tracker.blocks.candidates import (
    Run,
    is_class_attention,
    nested,
    outermost,
    possible_runs,
    proposal,
    proposals,
    related,
    runs_with_attention,
    whole_list,
)
from tracker.blocks.judge import Verdict
from tracker.blocks.lists import nothing_found, top_level
from tracker.blocks.towers import class_token_parameter, norms_around
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

CHECKED = "; assumed, and checked when measuring"
GUESS = ("blocks", "attention")  # what is assumed of blocks that no name shows
# Says of modules whether a forward pass shows them to be a chain of blocks
Judge = Callable[[Sequence[str]], Verdict]


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
    spans = [
        (_named_boundary(model, start), _named_boundary(model, end))
        for start, end in read_spans(blocks) or ()
    ]
    if spans:
        names = [boundary.module for span in spans for boundary in span]
        result = _describe(tree, names, "boundaries named by the caller")
        result = replace(result, batch_first=_is_batch_first(tree))
        # The last boundary may be its input
        if "norm" in type(tree.get_submodule(names[-1])).__name__.lower():
            result = replace(result, final_norms=(names[-1], *result.final_norms))
    elif blocks is not None:
        names = _named(model, tree, blocks)  # type: ignore[arg-type]
        result = _describe(tree, names, "named by the caller")
    else:
        result = choose(tree)
        names = result.names
    places = [_named_boundary(model, place) for place in read_fixed(fixed)]
    # Fixed tensors make spans of the blocks, and a forward pass confirms guesses of modules alone.
    if places and result.assumed == GUESS:
        raise UsageError(
            f"the blocks {names[0]} to {names[-1]} are a guess ({result.found_by}); name the blocks, too: "
            "blocks=find_blocks(model, BLOCKS, fixed=...)"
        )
    if final_norm is not None:
        result = replace(result, final_norms=(_name(model, final_norm),))
    if unembedding is not None:
        result = replace(result, unembedding=_name(model, unembedding) or result.unembedding)
    if batch_first is not None:
        result = replace(result, batch_first=batch_first)
    if class_token is not None:
        result = replace(result, class_token=class_token, class_token_parameter=None)
    return result.between_boundaries(spans or chain(names), places) if spans or places else result


def choose(tree: nn.Module, judge: Judge | None = None) -> Blocks:
    """Return the blocks of a model without wrappers, of the first kind that it has.

    Args:
        judge: judges guesses; without it, the first one is returned as what measuring has to confirm.

    Raises:
        BlocksNotFound: if there are no blocks, or several lists of them.
    """
    runs = runs_with_attention(tree)
    if declared := _declared(tree, runs):
        return declared
    trunks = [run for run in runs if not is_class_attention(run)]
    if whole := whole_list(tree, trunks):
        verdict = judge(whole.names) if judge else None
        if verdict is None or not verdict.finding:
            return _guess(tree, whole, verdict)
    if any(run.depth > 1 for run in runs):
        return _with_attention(tree, runs, trunks)
    possible = possible_runs(tree)
    if judge is None:
        first, *others = outermost(possible) or [None]
        if first is None or others:
            raise nothing_found(tree, proposals(tree, possible), runs)
        return _guess(tree, first)
    verdicts = {run: judge(run.names) for run in possible}
    chains = [run for run in possible if not verdicts[run].finding]
    # Of a list and a part of it, the whole
    chains = [run for run in chains if not any({*run.names} < {*other.names} for other in chains)]
    if len(chains) == 1:
        return _guess(tree, *chains, verdicts[chains[0]])
    if chains:
        raise BlocksNotFound(
            f"{len(chains)} lists of blocks found in {type(tree).__name__} by a forward pass: the modules of each move "
            "information between tokens.",
            proposals(tree, chains),
        )
    failed = [proposal(tree, run.names).failed(verdicts[run].finding) for run in possible]
    pairs = [line for run in possible for line in verdicts[run].pairs()]
    raise nothing_found(tree, pairs, runs, "".join(failed))


def confirmed(guess: Blocks, verdict: Verdict) -> Blocks:
    """Return blocks that were a guess, in the order and the layout that a forward pass showed."""
    return replace(
        guess,
        names=verdict.names,
        found_by=f"{guess.found_by.removesuffix(CHECKED)}, which a forward pass shows to be a chain of blocks",
        batch_first=verdict.batch_first,
        assumed=("blocks",),
    )


def _declared(tree: nn.Module, runs: Sequence[Run]) -> Blocks | None:
    """Return the blocks that a config declares, unless other lists of blocks may come before them or be inside them."""
    declared = declared_blocks(tree)
    if declared is None:
        return None
    others = [run for run in runs if not related(run, declared.names)]
    stages = [run for run in runs if nested(run, declared.names)]
    if not others and not stages:
        return _describe(tree, declared.names, declared.found_by, ("chain",))
    parts = set(declared.owner.modules())
    first = declared.names[0]
    predicts = in_text_tower(tree, first) or find_unembedding(tree, first) is not None
    leads_on = declared.of_text_tower or (predicts and not is_encoder_decoder(declared.owner))
    if leads_on and all(tree.get_submodule(run.container) in parts for run in others):
        return _describe(tree, declared.names, declared.found_by, ("blocks",))
    return None


def _with_attention(tree: nn.Module, runs: Sequence[Run], trunks: Sequence[Run]) -> Blocks:
    """Return the only list of blocks with attention.

    Args:
        trunks: the runs that are no class attention, which follows the blocks.
    """
    if len(trunks) == 1 and trunks[0].depth > 1 and len(trunks[0].classes) == 1:
        how = f"the only list of blocks with attention, {trunks[0]}"
        after = [f"{run.container} ({run})" for run in runs if run not in trunks]
        if after:
            how = f"{trunks[0]}, before the class attention of {', '.join(after)}"
        return _describe(tree, trunks[0].names, how, ("blocks",))
    why = "they may be towers, stages or parts of one chain"
    if len(runs) == 1:
        why = "its modules are of several classes"
    paths = ", ".join(proposal(tree, run.names).where for run in runs)
    raise BlocksNotFound(
        f"{len(runs)} list{'s'[len(runs) == 1 :]} of blocks found ({paths}) in {type(tree).__name__}, and {why}.",
        proposals(tree, runs),
    )


def _guess(tree: nn.Module, run: Run, verdict: Verdict | None = None) -> Blocks:
    """Return the modules of a list as blocks, which a forward pass has judged or is to judge."""
    guess = _describe(tree, run.names, f"a list of modules, {run}{CHECKED}", GUESS)
    return guess if verdict is None else confirmed(guess, verdict)


def _describe(
    tree: nn.Module, names: Sequence[str], found_by: str, assumed: tuple[str, ...] = ()
) -> Blocks:
    """Return the description of a model by the names of its blocks.

    Args:
        tree: the model without wrappers.
        names: of the blocks.
        found_by: how they were found.
        assumed: what a forward pass has to confirm of them.
    """
    of_text = in_text_tower(tree, names[0])
    parameter = None if of_text else class_token_parameter(tree, names)
    return Blocks(
        names=tuple(names),
        found_by=found_by,
        final_norms=tuple(norms_around(tree, names)),
        include_final_norm=of_text,
        unembedding=find_unembedding(tree, names[0]),
        class_token=None if parameter is None else 0,
        class_token_parameter=parameter,
        batch_first=_is_batch_first(tree.get_submodule(names[0])),
        assumed=assumed,
    )


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
