"""Confirm by forward passes what `find_blocks` assumed: that the blocks, and the class token, reach the model's output.

Two passes that differ in the last block's output alone: noise is added to it, at the class token's position or at all. What
the model returns must differ. Two more, as far as the first block, that differ in the class token's parameter alone: the
first block's input must differ at the class token's position and nowhere else. Cost: two forward passes, once per
measurement, and only where something was assumed (`Blocks.assumed`).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tracker.blocks.find import Blocks
from tracker.blocks.towers import class_token_parameter, find_runs, related
from tracker.capture.outputs import hidden_state, with_hidden_state
from tracker.capture.replica import Replica
from tracker.errors import UsageError

Call = tuple[Sequence[Any], Mapping[str, Any]]


def confirm(
    found: Blocks,
    new_replica: Callable[[], Replica],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    classifies: bool,
) -> None:
    """Compare forward passes on these inputs. Call inside `preserve_global_state`, after they were recorded.

    Args:
        new_replica: makes the replica of one pass: what a pass writes must not reach another one.
        classifies: whether the class token is measured because one was found, rather than asked for.

    Raises:
        UsageError: where the output does not depend on the last block, or not on the class token in it.
    """
    call = (arguments, keywords)
    token = found.class_token if classifies and "class token" in found.assumed else None
    if token is not None:
        _confirm_entry(found, new_replica, call, token)
    elif "blocks" not in found.assumed:
        return
    replica = new_replica()
    plain = _run(replica, call)
    if token is not None:
        at_token = _run(
            new_replica(), call, noise_at=slice(token, token + 1)
        )  # an assumed token is never counted from the end
        if _differ(_answers(plain), _answers(at_token)):
            return
    if not _differ(_floating(plain), _floating(_run(new_replica(), call, noise_at=slice(None)))):
        others = [run for run in find_runs(replica.module) if not related(run, found.names)]
        lines = "".join(f"\n  {run.line}  # {run}" for run in others) or " blocks='path.to.list', or a list of modules"
        raise UsageError(
            f"nothing that {type(replica.module).__name__} returns depends on its last block, {found.names[-1]} "
            f"({found.found_by}). Name the blocks that reach its output:{lines}"
        )
    if token is not None:
        raise UsageError(
            f"{type(replica.module).__name__} has a class token, but its output does not depend on it (position {token} "
            f"after {found.names[-1]}). {_SAY}"
        )


_SAY = "Say which tokens to measure: tokens='last', 'all', or positions such as [0, 1]"


def _confirm_entry(found: Blocks, new_replica: Callable[[], Replica], call: Call, token: int) -> None:
    model = new_replica().module
    parameter = class_token_parameter(model, found.names, find_runs(model))
    if parameter is None:
        return
    before, after = (_run(new_replica(), call, noisy=name, stop=True) for name in (None, parameter))
    moved = (before != after).any(-1).any(0).nonzero().squeeze(-1).tolist()
    if moved != [token]:
        where = "at no position" if not moved else f"at position {', '.join(map(str, moved))}"
        raise UsageError(
            f"the class token {parameter} enters the first block {where}, not at {token} alone. {_SAY}"
            + (f"; or blocks=find_blocks(model, class_token={moved[0]})" if len(moved) == 1 else "")
        )


class _Reached(Exception):
    """The first block was called with this state."""


def _run(
    replica: Replica,
    call: Call,
    noise_at: slice | None = None,
    noisy: str | None = None,
    stop: bool = False,
) -> Any:
    """What the model returns, with noise added to the last block's output or to a parameter, as large as they are.

    Parameters outside the blocks that are all zero have other values here.

    Args:
        noise_at: the positions of the last block's output.
        noisy: the parameter's name.
        stop: return the first block's input (B, n, d) instead.
    """
    lent, last, first = ExitStack(), replica.blocks[-1], replica.description.batch_first

    def enter(block: nn.Module, args: tuple, kwargs: dict) -> None:
        if stop:
            state = next(iter(inspect.signature(block.forward).bind(*args, **kwargs).arguments.values()))
            raise _Reached(state if first else state.transpose(0, 1))
        lent.enter_context(replica.materialize(block))
        replica.begin_call()

    def leave(block: nn.Module, args: tuple, output: Any) -> Any:
        replica.end_call(block)
        lent.close()
        if block is not last or noise_at is None:
            return None
        y = hidden_state(output)
        noise = torch.zeros_like(y)
        at = (slice(None), noise_at) if first else (noise_at,)
        noise[at] = _noise(y)[at]
        return with_hidden_state(output, y + noise)

    devices = [replica.device] if replica.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.callback(lent.close)
        stack.enter_context(torch.random.fork_rng(devices))
        torch.manual_seed(0)  # a model that draws random numbers draws the same ones in every pass
        stack.enter_context(replica.materialize(replica.module, but=replica.blocks))
        for block in replica.blocks:
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        inside = {id(part) for block in replica.blocks for part in block.modules()}
        for path, part in replica.module.named_modules():
            lent_here = part.__dict__["_parameters"]  # for this pass
            for name, value in lent_here.items() if id(part) not in inside else ():
                if value is None or not value.is_floating_point():
                    continue
                if not value.any():  # what an untrained head would hide (torchvision's begins as zeros)
                    lent_here[name] = value + _noise(value)
                if noisy == (f"{path}.{name}" if path else name):
                    lent_here[name] = lent_here[name] + _noise(value)
        stack.enter_context(replica.guard())
        arguments, keywords = replica.own((list(call[0]), dict(call[1])))
        try:
            return replica.module(*arguments, **keywords)
        except _Reached as reached:
            return reached.args[0]


def _noise(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(values.shape, generator=generator, dtype=values.dtype).to(values.device)
    return noise * (1 + values.square().mean().sqrt())


def _floating(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _answers(output: Any) -> list[Tensor]:
    """The logits; else what is one vector per sample; else all that is returned."""
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if isinstance(logits, Tensor):
        return [logits]
    values = _floating(output)
    return [value for value in values if value.dim() == 2] or values


def _differ(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether any of them differs; true where there is nothing to compare."""
    pairs = zip(before, after, strict=False)
    return not before or len(before) != len(after) or any(not torch.equal(a, b) for a, b in pairs)
