"""Record one forward pass of a model: hooks on its blocks and attentions fill a `Recording`.

The pass runs through a replica, so that all of it is in the measuring dtype. Recorded tensors beyond a memory budget are
kept in files (`recording.Spill`).
"""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tracker.common.errors import UsageError
from tracker.linalg.transfer import standard_normal
from tracker.model.attention import OriginalAttention, intercept_attention
from tracker.model.guard import copy_nested
from tracker.model.head import HeadHooks
from tracker.model.hidden_state import (
    ACCEPTED_FORMS,
    bind_arguments,
    check_finite,
    describe_output,
    hidden_state,
    passed_on,
    same_state,
    states_in,
)
from tracker.model.proposals import HOW_TO_NAME, BlocksNotFound, chained
from tracker.model.recording import AttentionCall, BlockCall, Recording, Spill, recording_kernels
from tracker.model.replica import ModuleState, Replica, irreproducible, require_stateless


def record(
    replica: Replica, arguments: Sequence[Any], keywords: Mapping[str, Any], memory: int = 1 << 30
) -> Recording:
    """Run the model once and record every block's call. Call inside `preserve_global_state`.

    Args:
        replica: the copy of the model that runs.
        arguments: positional arguments of the model's forward; they are copied.
        keywords: its keyword arguments; they are copied.
        memory: bytes of recorded tensors to keep in memory; the others go to files.

    Raises:
        UsageError: if a block was not reached, is not residual (its input and output differ in shape), or did not take the
            output of the block before it.
        FloatingPointError: if a block returned a value that is not finite.
    """
    recorder = _Recorder(replica, Spill(memory))
    with (
        replica.stream_blocks(recorder.enter_block, recorder.leave_block),
        recording_kernels(replica.dtype),
        recorder.head.watch(recorder.is_last_state),
        intercept_attention(recorder.record_attention),
    ):
        output = replica.forward(arguments, keywords)
        seed = replica.generators.drawn_seed()
    return recorder.recording(seed, output)


class _Recorder:
    """The hooks that record a pass, and what they have recorded so far."""

    def __init__(self, replica: Replica, spill: Spill):
        self.replica = replica
        self.spill = spill
        self.names = dict(zip(map(id, replica.blocks), replica.description.names, strict=True))
        self.calls: list[BlockCall] = []
        self.running: BlockCall | None = None
        self.head = HeadHooks(replica)
        self.states: dict[int, Tensor] = {}  # what the last block returned, `states_in`
        # The index in `states` of a second state that the running block takes, and that state.
        self.stream: tuple[int, Tensor] | None = None
        self.state_before: ModuleState | None = None
        # The states of the generators before the running block
        self.random_before: list[bytes] = []
        # Of arguments, by id and version
        self.copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def enter_block(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        """Record a block's arguments and input."""
        self.head.enter_block()
        self.state_before = None if id(block) in self.replica.stateless else ModuleState(block)
        self.random_before = self.replica.generators.states()
        name = self.names[id(block)]
        bound = bind_arguments(block, args, kwargs)
        state, given = self.state_argument(name, bound)
        x = self.input_of(name, given, bound)
        # Every replay sets it; keeping it here would keep the original alive.
        bound.arguments[state] = None
        memo: dict[int, Any] = {}  # what several arguments hold stays one object in the copies
        copies = OrderedDict()
        for key, value in bound.arguments.items():
            copies[key] = copy_nested(value, self.copy_argument, memo)
        bound = inspect.BoundArguments(bound.signature, copies)
        layer = len(self.calls) + 1
        self.running = BlockCall(layer, name, block, bound, state, self.replica, x)
        self.running.input_dtype = given.dtype

    def state_argument(self, name: str, bound: inspect.BoundArguments) -> tuple[str, Tensor]:
        """Return the name and the value of the argument that is a block's hidden state: its first."""
        if not bound.arguments:
            raise UsageError(
                f"block {name} is called without arguments; the first argument of a residual block is its hidden state"
            )
        state, x = next(iter(bound.arguments.items()))
        if not (isinstance(x, Tensor) and x.dim() == 3):
            argument = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(
                f"block {name} takes {argument}; a residual block takes a hidden state (batch, tokens, width). {HOW_TO_NAME}"
            )
        return state, x

    def input_of(self, name: str, given: Tensor, bound: inspect.BoundArguments) -> Tensor:
        """Return the input to record for a block: the output of the one before, which it has to equal."""
        x = self.replica.oriented(given).to(self.replica.dtype)
        streams = passed_on(bound, self.states)
        beside = [i for i in streams if i > 0]
        self.stream = (beside[0], self.states[beside[0]]) if beside else None
        if not self.calls:
            check_finite(x, f"the model, before its first block ({name}),")
            # A copy, here and of the output: a block may work on its input in place, and the model on the block's output.
            return self.spill.keep(x.clone())
        last = self.calls[-1]
        if self.is_last_state(x):
            return last.y
        if len(streams) > 1:
            raise two_streams(last.name, *(self.states[i] for i in streams[:2]))
        finding = (
            f"the model changes the hidden state between {last.name} and {name}; name consecutive blocks, so that each takes the "
            "output of the one before, or spans that include the change"
        )
        # It proposes that each begins where the one before ended.
        raise BlocksNotFound(finding, chained(self.replica.description))

    def copy_argument(self, value: Any) -> Any:
        """Return a copy of a tensor among the arguments; all blocks that are given it unchanged share one copy."""
        if not isinstance(value, Tensor):
            return value
        key = id(value), value._version
        if key not in self.copies:
            # The original is kept alive, so that its id is not reused.
            self.copies[key] = value, value.clone()
        return self.copies[key][1]

    def record_attention(self, attention: OriginalAttention) -> Any:
        """Record an attention's keys, values and mask, and run it."""
        if self.running is not None:
            # Copies: they may be views of a cache that the block writes to at every call.
            key, value = attention.key.clone(), attention.value.clone()
            recorded = AttentionCall(key, value, attention.mask, attention.causal)
            self.running.attention.append(recorded)
        return attention()

    def leave_block(self, block: nn.Module, args: tuple, output: Any) -> None:
        """Record a block's output, and check that the block keeps no state between calls."""
        call, self.running = self.running, None
        assert call is not None
        draws = self.replica.generators.states() != self.random_before
        y = hidden_state(output)
        if not isinstance(y, Tensor):
            raise UsageError(
                f"block {call.name} returns {describe_output(output)}; {ACCEPTED_FORMS}"
            )
        several = isinstance(output, (tuple, list))
        self.states = states_in(dict(enumerate(output)) if several else {})
        self.check_one_stream(call, y)
        y = self.replica.oriented(y).to(self.replica.dtype)
        if y.shape != call.x.shape:
            raise UsageError(
                f"block {call.name} maps {tuple(call.x.shape)} to {tuple(y.shape)}; a residual block keeps the shape. "
                f"{HOW_TO_NAME}"
            )
        check_finite(y, f"block {call.layer} ({call.name})")
        call.y = self.spill.keep(y.clone())
        changes = self.state_before is not None and self.state_before.changed()
        if draws or changes:
            self.check_function(call, draws, changes)
        self.replica.stateless.add(id(block))
        for attention in call.attention:
            attention.key = self.spill.keep(attention.key)
            attention.value = self.spill.keep(attention.value)
        self.calls.append(call)
        self.head.leave_block(hidden_state(output))

    def check_one_stream(self, call: BlockCall, y: Tensor) -> None:
        """Check that a block does not change a second state beside the hidden state, or return that one first.

        Raises:
            UsageError: if it does.
        """
        if self.stream is not None:
            place, argument = self.stream
            returned = self.states.get(place)
            if returned is not None and returned.shape == argument.shape:
                if not torch.equal(returned, argument):
                    raise two_streams(call.name, y, returned)
        if y.shape == call.x.shape:
            return
        # The block may have swapped two states of different shapes, and returned the hidden state second.
        others = [state.shape for state in states_in(call.arguments.arguments).values()]
        beside = [self.states[i] for i in self.states if i > 0]
        returned = [state for state in beside if state.shape == call.x.shape]
        if returned and y.shape in others:
            raise two_streams(call.name, returned[0], y)

    def check_function(self, call: BlockCall, draws: bool, changes: bool) -> None:
        """Check that the output of a block that draws random numbers, or changes its attributes, is a function of its input."""
        call = call.on_device()  # from a file
        block, description = f"block {call.layer} ({call.name})", self.replica.description
        with self.replica.materialize(call.block):
            if draws and id(call.block) not in self.replica.draws_for_nothing:
                if self.replica.generators.matter(partial(call, call.x)):
                    raise irreproducible(f"{block} draws random numbers", description)
                self.replica.draws_for_nothing.add(id(call.block))
            if changes and self.state_before is not None:
                # Another state than the recorded one: a cached output would agree on that.
                noise = standard_normal(call.x.shape, call.x) * call.x.square().mean().sqrt()
                again = partial(call, call.x + 0.1 * noise)
                observation = f"{block} does not reproduce its own output"
                require_stateless(call.block, self.state_before, again, observation, description)

    def is_last_state(self, x: Tensor) -> bool:
        """Whether x (B, n, d) equals the output recorded last, if there is one."""
        last = self.calls[-1].y if self.calls else None
        return last is not None and same_state(x, last)

    def recording(self, seed: int | None, output: Any) -> Recording:
        """Check the recorded calls and return them.

        Raises:
            UsageError: if the pass did not reach a block.
            FloatingPointError: if the final norm returned a value that is not finite.
        """
        reached = {call.name for call in self.calls}
        missed = [name for name in self.replica.description.names if name not in reached]
        if missed:
            raise UsageError(
                f"the forward pass never reached {len(missed)} of the blocks: {', '.join(missed)}; if the model calls "
                "parts of them separately, name the boundaries between blocks: blocks=[('input of A', 'output of B'), ...]"
            )
        return self.head.recording(self.calls, seed, output)


def two_streams(name: str, *states: Tensor) -> UsageError:
    """Return the error for a block that changes two states."""
    a, b = (tuple(state.shape) for state in states)
    of_sum = "If their sum is the hidden state (fused add and norm), wrap each block in a module that returns the sum. "
    return UsageError(
        f"block {name} takes and returns two hidden states, {a} and {b}, and changes both: the blocks carry two streams, and "
        f"the Jacobian of one leaves out what passes through the other, so neither alone is the hidden state. "
        f"{of_sum if a == b else ''}{HOW_TO_NAME}"
    )
