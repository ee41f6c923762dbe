"""Confirm by forward passes what was assumed of a model: its blocks, that they reach its output, and its class token.

Blocks are found by what modules do, where no attention is recognised by name. A list is a chain of blocks if each of its modules

- takes and returns a tensor of one shape, (batch, tokens, width);
- takes the output of the module before it, unchanged;
- moves information between tokens: another value of the first or of the last token changes its output at other tokens.

The last condition tells blocks with attention, whatever their classes are called, from stacks of MLPs. In the pass,
parameters that are all zero get other values, because a projection that starts at zero hides what an untrained block does.
Cost: one forward pass in which each module of a list is called three to six times. Memory: the model's weights in the
measuring dtype, and two hidden states for each list.

That blocks and the class token reach the output is seen by comparison. Two passes that differ in the last block's output alone,
with noise added at the class token's position or at all positions, must give different model outputs. Two passes that differ in
the class token's parameter alone must differ in the first block's input at the class token's position and nowhere else. Cost:
two or three forward passes of one sample once per measurement, and two up to the first block; none if nothing was assumed
(`Blocks.assumed`).

Text encoders have a class token at the beginning of a text and tokens that end it ([SEP] of BERT). In a
model whose tokens attend to later ones, the last token of a sample is the last one that is not a separator, class or end token.
These stand for no word, but in such a model they are what a tokenizer puts last. Causal models predict from their last token,
whatever it is, and keep it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tracker.blocks.find import find_blocks
from tracker.blocks.lists import candidate_runs, nothing_found
from tracker.blocks.towers import ModuleRun, class_token_parameter, find_runs, proposals, related
from tracker.common.errors import UsageError
from tracker.model.description import Blocks
from tracker.model.hidden_state import (
    bind_arguments,
    check_finite,
    floating_tensors,
    hidden_state,
    named_values,
    with_hidden_state,
)
from tracker.model.inputs import Batch, positions
from tracker.model.proposals import BlocksNotFound, Proposal
from tracker.model.random_numbers import noise_like
from tracker.model.recording import BlockCall, Recording
from tracker.model.replica import Replica, StopForward
from tracker.model.wrappers import unwrap

TOKENS = 1  # the axis of tokens in a hidden state that is batch first


@dataclass
class Observed:
    """What a forward pass showed of the modules of one list."""

    order: list[str] = field(default_factory=list)  # their names, in the order of their first calls
    mixed: dict[str, set[int]] = field(default_factory=dict)  # of each: axes along which it moves information
    fault: str = ""  # why the list is no chain of hidden states
    last: Tensor | None = None  # the output of the module that ran last
    tokens: int = 0  # the larger one of batch and tokens

    def finding(self, run: ModuleRun) -> str:
        """Say why these modules are no chain of blocks; empty if they are one."""
        if self.fault:
            return self.fault
        if not self.order:
            return "the forward pass does not call them"
        if len(self.order) < len(run.names):
            return f"the forward pass calls {len(self.order)} of them"
        still = [name for name in run.names if not self.mixed[name]]
        if not still:
            return ""
        if self.tokens < 2:
            return "not decided: with one token, nothing moves between tokens; give an input of at least two"
        if len(still) == len(run.names):
            return "they move no information between tokens"
        return f"{len(still)} of them move no information between tokens"

    def pairs(self, run: ModuleRun) -> list[Proposal]:
        """Return spans from each module that moves information between tokens to the next, if some modules move none."""
        starts = [f"input of {name}" for name in self.order if self.mixed[name]]
        if self.fault or self.tokens < 2 or not 1 < len(starts) < len(run.names) == len(self.order):
            return []
        boundaries = [*starts, f"output of {run.names[-1]}"]
        contents = (
            f"{len(starts)} blocks; each module that moves no information between tokens belongs to the one before it"
        )
        return [Proposal(repr(boundaries), boundaries, f"{boundaries[0]} to {boundaries[-1]}", contents)]

    def batch_first(self) -> bool:
        """Whether information moves along the second axis of the states, rather than along the first."""
        return all(TOKENS in axes for axes in self.mixed.values())


def choose_blocks(model: nn.Module, new_replica: Callable[[Blocks], Replica], batch: Batch) -> Blocks:
    """Return the only chain of blocks that a forward pass shows. Call inside `preserve_global_state`.

    Args:
        model: a model in which no attention is recognised by name (`recognises_blocks`).
        new_replica: makes the replica for the pass.
        batch: the forward call.

    Raises:
        BlocksNotFound: if no list is such a chain, or several are.
        FloatingPointError: if a module of a list takes or returns a value that is not finite.
    """
    model = unwrap(model)
    runs = candidate_runs(model)
    observed = _observe(new_replica(Blocks((), "")), runs, batch) if runs else []
    findings = [seen.finding(run) for run, seen in zip(runs, observed, strict=True)]
    chains = [(run, seen) for run, seen, finding in zip(runs, observed, findings, strict=True) if not finding]
    if not chains:
        pairs = [proposal for run, seen in zip(runs, observed, strict=True) for proposal in seen.pairs(run)]
        raise nothing_found(model, runs, findings, pairs)
    if len(chains) > 1:
        raise BlocksNotFound(
            f"{len(chains)} lists of blocks found in {type(model).__name__} by a forward pass: the modules of each move "
            "information between tokens.",
            proposals(model, [run for run, _ in chains]),
        )
    ((run, seen),) = chains
    blocks = find_blocks(model, seen.order, batch_first=seen.batch_first())
    how = f"the only list of modules of one class that move information between tokens in a forward pass, {run}"
    return replace(blocks, found_by=how, assumed=("blocks", *blocks.assumed))


def confirm_blocks(assumed: Blocks, model: nn.Module, new_replica: Callable[[Blocks], Replica], batch: Batch) -> Blocks:
    """Return the blocks assumed from the module tree, laid out as a forward pass shows. Arguments as in `choose_blocks`.

    Raises:
        BlocksNotFound: if the forward pass shows no chain of blocks, or another one.
    """
    seen = choose_blocks(model, new_replica, batch)
    if seen.names != assumed.names:
        names = list(seen.names)
        where = f"{names[0]} to {names[-1]}"
        raise BlocksNotFound(
            f"{assumed.names[0]} to {assumed.names[-1]} ({assumed.found_by}) are not the blocks: a forward pass shows {where}.",
            [Proposal(repr(names), names, where, seen.found_by)],
        )
    return replace(assumed, batch_first=seen.batch_first)


def _observe(replica: Replica, runs: Sequence[ModuleRun], batch: Batch) -> list[Observed]:
    """Run the model once and watch the modules of every list."""
    observer, observed = _Observer(), [Observed() for _ in runs]
    with ExitStack() as stack:
        stack.enter_context(replica.materialize(replica.module))
        for part in replica.module.modules():
            parameters = part.__dict__["_parameters"]  # the replica's own, released after this pass
            for name, value in parameters.items():
                if value is not None and value.is_floating_point() and not value.any():
                    parameters[name] = noise_like(value)
        for run, seen in zip(runs, observed, strict=True):
            for name in run.names:
                module = replica.module.get_submodule(name)
                enter = module.register_forward_pre_hook(partial(observer.enter, name, seen), with_kwargs=True)
                leave = module.register_forward_hook(partial(observer.leave, name, seen), with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
        replica.forward(batch.arguments, batch.keywords)
    return observed


class _Observer:
    """The hooks on the modules of all lists."""

    def __init__(self) -> None:
        self.repeating = False  # whether a module is being called again
        self.given: dict[str, Tensor] = {}  # by name: a copy of the state, as a module may work on it in place

    def enter(self, name: str, seen: Observed, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Record the state that a module takes, and whether the module before it returned that."""
        if self.repeating or seen.fault:
            return
        x = next(iter(bind_arguments(module, args, kwargs).arguments.values()), None)
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            seen.fault = f"they take {shape}, not (batch, tokens, width)"
            return
        if seen.last is None:
            check_finite(x, f"the model, before {name},")
        if seen.last is not None and not (x.shape == seen.last.shape and torch.equal(x, seen.last)):
            seen.fault = "the model changes the state between them"
        else:
            self.given[name] = x.clone()

    def leave(self, name: str, seen: Observed, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Record what a module returns, and along which axes it moves information."""
        if self.repeating or name not in self.given:
            return
        x, y = self.given.pop(name), hidden_state(output)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            seen.fault = f"they map {tuple(x.shape)} to {shape}"
            return
        check_finite(y, f"block {name}")
        seen.last, seen.tokens = y.clone(), max(x.shape[:2])
        if name not in seen.mixed:
            seen.order.append(name)
            self.repeating = True
            try:
                seen.mixed[name] = _mixed_axes(partial(_call, module, args, kwargs), x)
            finally:
                self.repeating = False


def _mixed_axes(block: Callable[[Tensor], Tensor], x: Tensor) -> set[int]:
    """Return the axes along which another value at the first or the last index changes the output at other indices."""
    plain = block(x)
    mixed = set()
    for axis in (TOKENS, 0):
        n = x.shape[axis]
        for index in (0, n - 1):
            if axis not in mixed and n > 1:
                other = x.clone()
                other.select(axis, index).add_(noise_like(other.select(axis, index)))
                rest = [i for i in range(n) if i != index]
                at = (slice(None), rest) if axis == TOKENS else (rest,)
                # Exactly: a layer scale of 1e-6 moves little, and rows that do not depend on each other stay as they are.
                if not torch.equal(block(other)[at], plain[at]):
                    mixed.add(axis)
    return mixed


def _call(module: nn.Module, args: tuple, kwargs: dict, x: Tensor) -> Tensor:
    bound = bind_arguments(module, args, kwargs)
    bound.arguments[next(iter(bound.arguments))] = x.clone()
    return hidden_state(module(*bound.args, **bound.kwargs))


ForwardArguments = tuple[Sequence[Any], Mapping[str, Any]]

REMEDY = "Choose the tokens to measure: tokens='last', 'all', or positions such as [0, 1]"


def check_reachability(
    blocks: Blocks,
    new_replica: Callable[[], Replica],
    batch: Batch,
    class_token_by_default: bool,
) -> None:
    """Check the assumptions on the first sample. Call inside `preserve_global_state`, after the inputs were recorded.

    Args:
        blocks: the blocks and what was assumed about them.
        new_replica: makes the replica for one pass: what a pass writes must not reach another one.
        batch: the inputs.
        class_token_by_default: whether the class token is measured because the model has one, not because the caller chose it.

    Raises:
        UsageError: if the output does not depend on the last block, or not on the class token in it, or has no floating tensor.
    """
    first = batch.of_first_sample()
    inputs = (first.arguments, first.keywords)
    token = blocks.class_token if class_token_by_default and "class token" in blocks.assumed else None
    if token is not None:
        _check_class_token_position(blocks, new_replica, inputs, token)
    elif "blocks" not in blocks.assumed:
        return
    replica = new_replica()
    plain = _run(replica, inputs)
    if not floating_tensors(plain):
        stated = [f"blocks={list(blocks.names)}"] if "blocks" in blocks.assumed else []
        stated += ["tokens='cls'"] if token is not None else []
        raise UsageError(
            f"{type(replica.module).__name__} returns a {type(plain).__name__} without a floating tensor, so that nothing shows "
            f"whether its last block, {blocks.names[-1]}, reaches its output; measure a model, or a part of it, that returns "
            f"what it computes, or say what to measure: {', '.join(stated)}"
        )
    if token is not None:  # an assumed token never counts from the end
        noisy = _run(new_replica(), inputs, noise_at=slice(token, token + 1))
        if _differ(_predictions(plain), _predictions(noisy)):
            return
    if not _differ(floating_tensors(plain), floating_tensors(_run(new_replica(), inputs, noise_at=slice(None)))):
        others = [run for run in find_runs(replica.module) if not related(run, blocks.names)]
        raise BlocksNotFound(
            f"nothing that {type(replica.module).__name__} returns depends on its last block, {blocks.names[-1]} "
            f"({blocks.found_by}): name blocks that reach its output.",
            proposals(replica.module, others),
        )
    if token is not None:
        raise UsageError(
            f"{type(replica.module).__name__} has a class token, but its output does not depend on it (position {token} "
            f"after {blocks.names[-1]}). {REMEDY}"
        )


def reads_first_position_alone(new_replica: Callable[[], Replica], batch: Batch) -> bool:
    """Whether the outputs with one vector per sample (a pooler's, or logits of classes) depend on position 0 alone.

    It is then the class token, whatever reads it. Blocks between boundaries are not examined. Cost: up to three forward passes.
    """
    replica, first = new_replica(), batch.of_first_sample()
    if replica.description.spans:
        return False
    inputs = (first.arguments, first.keywords)
    plain, at_first, elsewhere = (
        [value for value in floating_tensors(_run(one, inputs, noise_at=at)) if value.dim() == 2]
        for one, at in ((replica, None), (new_replica(), slice(0, 1)), (new_replica(), slice(1, None)))
    )
    return bool(plain) and _differ(plain, at_first) and not _differ(plain, elsewhere)


def _check_class_token_position(
    blocks: Blocks, new_replica: Callable[[], Replica], inputs: ForwardArguments, token: int
) -> None:
    model = new_replica().module
    parameter = class_token_parameter(model, blocks.names, find_runs(model))
    if parameter is None:
        return
    before, after = (
        _run(new_replica(), inputs, noisy_parameter=name, until_first_block=True) for name in (None, parameter)
    )
    changed = (before != after).any(-1).any(0).nonzero().squeeze(-1).tolist()
    if changed != [token]:
        where = "at no position" if not changed else f"at position {', '.join(map(str, changed))}"
        raise UsageError(
            f"the class token {parameter} enters the first block {where}, not at {token} alone. {REMEDY}"
            + (f"; or blocks=find_blocks(model, class_token={changed[0]})" if len(changed) == 1 else "")
        )


def _run(
    replica: Replica,
    inputs: ForwardArguments,
    noise_at: slice | None = None,
    noisy_parameter: str | None = None,
    until_first_block: bool = False,
) -> Any:
    """Run the model with noise of the size of the values added to the last block's output or to a parameter.

    Parameters outside the blocks that are all zero get other values, the same in every pass: an untrained head of zeros
    (torchvision's) would hide what the blocks return.

    Args:
        replica: a replica made for this pass.
        inputs: arguments of the model's forward.
        noise_at: positions of the last block's output.
        noisy_parameter: the parameter's name.
        until_first_block: whether to return the first block's input (B, n, d) instead of the model's output.
    """
    last, batch_first = replica.blocks[-1], replica.description.batch_first

    def enter(block: nn.Module, args: tuple, kwargs: dict) -> None:
        if until_first_block:
            state = next(iter(bind_arguments(block, args, kwargs).arguments.values()))
            raise StopForward(state if batch_first else state.transpose(0, 1))

    def leave(block: nn.Module, args: tuple, output: Any) -> Any:
        if block is not last or noise_at is None:
            return None
        y = hidden_state(output)
        noise = torch.zeros_like(y)
        at = (slice(None), noise_at) if batch_first else (noise_at,)
        noise[at] = noise_like(y)[at]
        return with_hidden_state(output, y + noise)

    with ExitStack() as stack:
        stack.enter_context(replica.stream_blocks(enter, leave))
        inside = {id(part) for block in replica.blocks for part in block.modules()}
        for path, part in replica.module.named_modules():
            parameters = part.__dict__["_parameters"]  # the replica's own, released after this pass
            for name, value in parameters.items() if id(part) not in inside else ():
                if value is None or not value.is_floating_point():
                    continue
                if not value.any():
                    parameters[name] = value + noise_like(value)
                if noisy_parameter == (f"{path}.{name}" if path else name):
                    parameters[name] = parameters[name] + noise_like(value)
        return replica.forward(*inputs)


def _predictions(output: Any) -> list[Tensor]:
    """Return the logits; without logits, the outputs with one vector per sample; without those, all floating outputs."""
    named = named_values(output)
    logits = named.get("logits") if isinstance(named, Mapping) else None
    if isinstance(logits, Tensor):
        return [logits]
    values = floating_tensors(output)
    return [value for value in values if value.dim() == 2] or values


def _differ(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether any pair of tensors differs, or their number."""
    pairs = zip(before, after, strict=False)
    return len(before) != len(after) or any(not torch.equal(a, b) for a, b in pairs)


LAST_WORD = "last non-special"  # attribute `tokens` of results in which special tokens at the end are left out


def with_class_token(blocks: Blocks, calls: Sequence[Batch], new_replica: Callable[[], Replica]) -> Blocks:
    """Return the blocks with the class token's position; text encoders have it where their tokenizer puts it, at position 0.

    Without a tokenizer, and if the config states no class token either, position 0 is the class token if the model's pooler,
    or its head for classes, reads it and no other. Call inside `preserve_global_state`.

    Raises:
        UsageError: if a prompt does not begin with a class token, or nothing shows that the inputs do.
    """
    if blocks.class_token is not None:
        return blocks
    for i, batch in enumerate(calls):
        reason = _why_no_class_token(batch, i, new_replica)
        if reason:
            raise UsageError(f"tokens='cls', but {reason}; choose 'last', 'all' or indices such as [0]")
        if batch.special.first is None:
            break  # what the model reads is the same in every call
    return replace(blocks, class_token=0)


def _why_no_class_token(batch: Batch, i: int, new_replica: Callable[[], Replica]) -> str:
    """Return why position 0 is not known to be a class token; "" if it is."""
    if batch.ids is not None and batch.special.first is not None:
        valid = torch.ones_like(batch.ids) if batch.valid is None else batch.valid.to(batch.ids.device).int()
        begins = batch.ids.gather(1, valid.argmax(1, keepdim=True)).flatten().tolist()
        other = next((b for b, token in enumerate(begins) if token != batch.special.first), None)
        if other is None:
            return ""
        sample = f"prompt {i}" if batch.token_texts else f"sample {other}"
        return f"{sample} begins with token {begins[other]}, not with the class token, {batch.special.first}"
    if batch.token_texts:
        return "the tokenizer has no class token (cls_token_id)"
    if batch.valid is not None and not batch.valid[:, 0].all():
        return "a sample begins with padding, and no tokenizer or config states a class token"
    if not reads_first_position_alone(new_replica, batch):
        return "the model has no class token: no pooler or classifier reads position 0 alone, and no config states one"
    return ""


def chosen_positions(
    tokens: str | tuple[int, ...],
    recording: Recording,
    batch: Batch,
    valid: Sequence[list[int]],
    class_token: int | None,
) -> tuple[list[list[int]], str]:
    """Return the positions to measure in each sample, and the convention in words: the attribute `tokens`.

    Args:
        valid: the positions of each sample that are not padding.
    """
    if tokens == "last" and (words := _without_special_ends(recording.calls[0], batch, valid)):
        return [positions("last", at, None) for at in words], LAST_WORD
    stated = tokens if isinstance(tokens, str) else ", ".join(map(str, tokens))
    return [positions(tokens, at, class_token) for at in valid], "last" if stated == "-1" else stated


def _without_special_ends(call: BlockCall, batch: Batch, valid: Sequence[list[int]]) -> list[list[int]] | None:
    """Return the positions without special tokens at the end; None if there are none, or if the first block is causal.

    A sample of special tokens alone keeps them.
    """
    ids, n = batch.ids, call.x.shape[1]
    if ids is None or ids.shape[1] != n:  # the blocks may take more positions than there are ids
        return None
    words = []
    for row, at in zip(ids.tolist(), valid, strict=True):
        content = [place for place, t in enumerate(at, 1) if row[t] not in batch.special.ends]
        words.append(at[: content[-1]] if content else list(at))
    shortened = [
        (b, len(inner)) for b, (inner, at) in enumerate(zip(words, valid, strict=True)) if len(inner) < len(at)
    ]
    if not shortened:
        return None
    b, count = shortened[0]
    return words if _attends_to_later(call, b, valid[b][:count], valid[b][count]) else None


def _attends_to_later(call: BlockCall, b: int, before: list[int], later: int) -> bool:
    """Whether a block's outputs at the positions before `later` in sample b depend on its input there."""
    replica = call.replica
    call = call.to(replica.dtype, replica.device)
    noisy = call.x.clone()
    noisy[b, later] = -noisy[b, later].roll(1)
    with replica.materialize(call.block), replica.materialize(call.final_norm):
        plain, changed = (call(x)[b, before] for x in (call.x, noisy))
    return not torch.equal(plain, changed)
