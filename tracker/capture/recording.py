"""One forward pass recorded as replayable block calls: every block's arguments, input, output, keys and values.

The pass runs through a replica, so that all of it shares the measuring dtype. Memory: the hidden states and every block's
keys and values, beyond a budget in files (`spill`).
"""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tracker.capture import outputs, residual_pair
from tracker.capture.attention import OriginalAttention, intercept_attention
from tracker.capture.copies import clone_if_tensor, copy_nested
from tracker.capture.module_state import STATELESS, ModuleState
from tracker.capture.outputs import hidden_state
from tracker.capture.recomputation import checkpointing_disabled
from tracker.capture.replica import Replica
from tracker.capture.spill import Spill
from tracker.errors import UsageError
from tracker.linalg.linear import FrozenLinear
from tracker.linalg.precision import float32_products


@dataclass
class AttentionCall:
    """What one attention of a block was given in the recorded pass; shapes as in `tracker.capture.attention`."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool


@dataclass
class BlockCall:
    """One block at work in the recorded pass: its arguments, input, output and attentions. Layer l is 1-based."""

    layer: int
    name: str
    block: nn.Module
    arguments: inspect.BoundArguments
    state: str  # the argument that carries the hidden state
    batch_first: bool
    replica: Replica = field(repr=False)
    x: Float[Tensor, "B n d"]
    y: Float[Tensor, "B n d"] = field(init=False)
    final_norm: nn.Module | None = None
    attention: list[AttentionCall] = field(default_factory=list)
    # Of a block that passes its state on as two tensors, whose sum is the hidden state:
    second_argument: str | None = None  # the argument that carries the other one; None where it was not given
    second_output: int | None = None  # its place in the output
    given_in: torch.dtype | None = None  # the precision of the state as the model keeps it between blocks

    def kept(self) -> Iterator[Tensor]:
        """What was recorded."""
        yield from (self.x, self.y)
        for attention in self.attention:
            yield from (attention.key, attention.value)

    def to(self, dtype: torch.dtype, device: torch.device) -> "BlockCall":
        """The same call with its recorded tensors in this dtype and on this device."""
        if all(t.dtype == dtype and t.device == device for t in self.kept()):
            return self

        def convert(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # What the model itself keeps in another precision stays in it.
            return value.to(device, dtype if value.dtype == self.replica.dtype else value.dtype)

        arguments = {name: copy_nested(value, convert, {}) for name, value in self.arguments.arguments.items()}
        bound = inspect.BoundArguments(self.arguments.signature, OrderedDict(arguments))
        attention = [AttentionCall(convert(a.key), convert(a.value), convert(a.mask), a.causal) for a in self.attention]
        other = replace(self, arguments=bound, x=convert(self.x), attention=attention)
        other.y = convert(self.y)
        return other

    def __call__(self, x: Tensor, arguments: Mapping[str, Any] | None = None, second: Tensor | None = None) -> Tensor:
        """Run the block, final norm included where it is folded in, on a hidden state (B, n, d).

        Args:
            arguments: take the place of recorded ones.
            second: of a state in two tensors the second one, of x's shape, which x is then without.
        """
        arguments = arguments or {}
        # Copies: what the block writes into its arguments must not reach the next call.
        recorded = {name: value for name, value in self.arguments.arguments.items() if name not in arguments}
        bound = inspect.BoundArguments(self.arguments.signature, OrderedDict(self.arguments.arguments))
        bound.arguments.update(copy_nested(recorded, clone_if_tensor, {}) | dict(arguments))
        given = x if self.given_in in (None, self.replica.dtype) else x.to(self.given_in)
        bound.arguments[self.state] = given if self.batch_first else given.transpose(0, 1)
        if self.second_argument is not None:
            second = torch.zeros_like(x) if second is None else second
            residual_pair.put(bound, self.second_argument, second if self.batch_first else second.transpose(0, 1))
        with self.replica.guard(), self.replica.fresh_weights(self.block):
            output = self.block(*bound.args, **bound.kwargs)
            out = hidden_state(output)
            out = out if self.second_output is None else out + output[self.second_output]
            out = out if self.final_norm is None else self.final_norm(out)
        return (out if self.batch_first else out.transpose(0, 1)).to(x.dtype)


@dataclass
class Recording:
    """One forward pass: the calls of its blocks, and the final norm that took the last block's output, if any."""

    calls: list[BlockCall]
    final_norm: tuple[str, nn.Module] | None
    normed: Float[Tensor, "B n d"] | None  # the final norm's output
    raw_last: BlockCall | None = None  # the last block without the final norm, where that is counted as part of it

    def states(self, sample: int, tokens: slice, device: torch.device) -> Float[Tensor, "depth n d"]:
        """x^0 .. x^L of a sample at these tokens, as the calls have them."""
        recorded = (self.calls[0].x, *(call.y for call in self.calls))
        return torch.stack([x[sample, tokens].to(device) for x in recorded])

    def scalars(self) -> int:
        """How many it holds: hidden states, keys and values."""
        calls = [*self.calls, *([self.raw_last] if self.raw_last else [])]
        return sum({id(t): t.numel() for call in calls for t in call.kept()}.values())

    def without_last_block(self) -> "Recording":
        """The same pass up to the last block's input."""
        return Recording(self.calls[:-1], None, None)

    def fold_final_norm(self) -> "Recording":
        """The same pass with the final norm counted as part of the last block (paper eq. 7)."""
        if self.final_norm is None or self.normed is None:
            return self
        last = replace(self.calls[-1], final_norm=self.final_norm[1])
        last.y = self.normed
        return replace(self, calls=[*self.calls[:-1], last], raw_last=self.calls[-1])


_ONE_AT_A_TIME = RLock()


@contextmanager
def preserve_global_state(device: torch.device) -> Iterator[None]:
    """Global state that a pass needs or could change: gradients, inference mode, autocast, RNG, fused paths, compilation.

    Most of it belongs to the process, not to a thread: two threads that set and put back the same switches would leave
    them set, so measurements take turns.
    """
    devices = [device] if device.type == "cuda" else []
    with _ONE_AT_A_TIME, ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        stack.enter_context(float32_products("ieee"))
        stack.enter_context(checkpointing_disabled())
        torch.backends.mha.set_fastpath_enabled(False)  # the fused encoder layer never calls attention
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it costs seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def recorded_products(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """How linear layers multiply while a pass is recorded. In float64 `FrozenLinear` wins nothing, and what a block computes in
    float32 all the same is left as it is.
    """
    return FrozenLinear() if dtype == torch.float32 else nullcontext()


def record(replica: Replica, arguments: Sequence[Any], keywords: Mapping[str, Any], memory: int = 1 << 30) -> Recording:
    """Run the model once and keep every block's call, beyond `memory` bytes in files. Call inside `preserve_global_state`.

    Raises:
        UsageError: if a block was not reached, is not residual (input and output differ in shape), or the next block got
            something other than its output.
        FloatingPointError: if a block gave a value that is not finite.
    """
    recorder = _Recorder(replica, Spill(memory))
    with ExitStack() as stack:
        stack.enter_context(replica.materialize(replica.module, but=replica.blocks))
        for handle in recorder.hooks():
            stack.callback(handle.remove)
        stack.enter_context(intercept_attention(recorder.attend))
        stack.enter_context(recorded_products(replica.dtype))
        stack.enter_context(replica.guard())
        arguments, keywords = replica.own((list(arguments), dict(keywords)))
        replica.module(*arguments, **keywords)
    return recorder.finished()


class _Recorder:
    def __init__(self, replica: Replica, spill: Spill):
        self.replica = replica
        self.spill = spill
        self.names = dict(zip(map(id, replica.blocks), replica.description.names, strict=True))
        self.calls: list[BlockCall] = []
        self.running: BlockCall | None = None
        self.lent = ExitStack()
        self.normed: tuple[str, nn.Module, Tensor] | None = None
        self.outputs: dict[int, Tensor] = {}  # of the last block, where it returned several of the state's shape
        self.state_before: ModuleState | None = None
        self.checking = False
        self.copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of arguments, by id and version

    def hooks(self) -> Iterator[Any]:
        for block in self.replica.blocks:
            yield block.register_forward_pre_hook(self.enter, with_kwargs=True)
            yield block.register_forward_hook(self.leave)
        for name in self.replica.description.final_norms:
            norm = self.replica.module.get_submodule(name)
            yield norm.register_forward_hook(partial(self.norm, name))

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.checking:
            return
        self.state_before = None if id(block) in self.replica.stateless else ModuleState(block)
        self.lent.enter_context(self.replica.materialize(block))
        self.replica.begin_call()
        bound = inspect.signature(block.forward).bind(*args, **kwargs)
        name = self.names[id(block)]
        if not bound.arguments:
            raise UsageError(f"block {name} is called without arguments; a residual block takes a hidden state first")
        state = next(iter(bound.arguments))
        x = bound.arguments[state]
        if not (isinstance(x, Tensor) and x.dim() == 3):
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UsageError(
                f"block {name} takes {given}; a residual block takes a hidden state (batch, tokens, width)"
            )
        batch_first = self.replica.description.batch_first
        place, second = self.pair_up(bound, state) if self.outputs else (None, None)
        x = x if second is None else x + residual_pair.get(bound, second)
        x, given_in = (x if batch_first else x.transpose(0, 1)).to(self.replica.dtype), x.dtype
        # Copies, here and of the output: a block may work on its input in place, and the model on the block's output.
        if not self.calls:
            self.check_finite(x, f"the model, before its first block ({name}),")
            x = self.spill.keep(x.clone())
        elif self.same_as_last_output(x):
            x = self.calls[-1].y
        else:
            raise UsageError(
                f"the model changes the hidden state between {self.calls[-1].name} and {name}; "
                "name consecutive blocks, so that each takes the output of the one before"
            )
        bound.arguments[state] = None  # given at every call; here it would keep the original alive
        if second is not None:
            residual_pair.put(bound, second, None)
        memo: dict[int, Any] = {}
        given = {key: copy_nested(value, self.copy_of, memo) for key, value in bound.arguments.items()}
        bound = inspect.BoundArguments(bound.signature, OrderedDict(given))
        layer = len(self.calls) + 1
        self.running = BlockCall(layer, name, block, bound, state, batch_first, self.replica, x)
        self.running.second_argument, self.running.second_output = second, place
        self.running.given_in = given_in

    def copy_of(self, value: Any) -> Any:
        """A copy of a tensor among the arguments; one for all blocks that are given it unchanged."""
        if not isinstance(value, Tensor):
            return value
        key = id(value), value._version
        if key not in self.copies:
            self.copies[key] = value, value.clone()  # the original is kept, so that its id stays its own
        return self.copies[key][1]

    def pair_up(self, bound: inspect.BoundArguments, state: str) -> tuple[int | None, str | None]:
        """Where the block before handed its state on as two tensors, take their sum for it.

        Returns:
            The place of the second one in the output, and the argument that carries it on.
        """
        place, second = residual_pair.find_pair(bound, state, self.outputs)
        before = self.calls[-1]
        if place is not None and before.second_output is None:  # the first time
            first = self.outputs[0] + self.outputs[place]
            before.second_output, before.y = (
                place,
                self.spill.keep(first if before.batch_first else first.transpose(0, 1)),
            )
            given = None if second is None else residual_pair.get(before.arguments, second)
            if isinstance(given, Tensor) and given.shape == self.outputs[0].shape:
                assert second is not None
                before.second_argument = second
                residual_pair.put(before.arguments, second, None)
                before.x = self.spill.keep(before.x + (given if before.batch_first else given.transpose(0, 1)))
        return place, second

    def attend(
        self, attend: OriginalAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Any:
        if self.running is not None:
            self.running.attention.append(AttentionCall(key, value, mask, causal))
        return attend(query, key, value, mask, causal)

    def leave(self, block: nn.Module, args: tuple, output: Any) -> None:
        if self.checking:
            return
        call, self.running = self.running, None
        assert call is not None
        self.replica.end_call(block)
        y = hidden_state(output)
        if not isinstance(y, Tensor):
            raise UsageError(f"block {call.name} returns {outputs.described(output)}; {outputs.FORMS}")
        self.outputs = residual_pair.outputs_like(y, output)
        y = y if call.second_output is None else y + output[call.second_output]
        y = (y if call.batch_first else y.transpose(0, 1)).to(self.replica.dtype)
        if y.shape != call.x.shape:
            raise UsageError(
                f"block {call.name} maps {tuple(call.x.shape)} to {tuple(y.shape)}; a residual block keeps the shape"
            )
        self.check_finite(y, f"block {call.layer} ({call.name})")
        call.y = self.spill.keep(y.clone())
        if self.state_before is not None and self.state_before.changed():
            self.check_stateless(call, self.state_before)
        self.replica.stateless.add(id(block))
        self.lent.close()
        for attention in call.attention:
            attention.key, attention.value = self.spill.keep(attention.key), self.spill.keep(attention.value)
        self.calls.append(call)
        self.normed = None  # a norm met so far took an earlier block's output

    def check_stateless(self, call: BlockCall, before: ModuleState) -> None:
        """Compare the block as the recorded call left it with the block as it was before that call, on another input."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(call.x.shape, generator=generator, dtype=torch.float64).to(call.x)
        x = call.x + 0.1 * noise * call.x.square().mean().sqrt()
        self.checking = True
        after = ModuleState(call.block)
        seen = call(x)
        with self.replica.materialize(call.block):
            before.restore()
            expected = call(x)
        after.restore()
        self.checking = False
        if not torch.allclose(seen, expected, rtol=0, atol=STATELESS * float(expected.abs().max()), equal_nan=True):
            raise UsageError(
                f"block {call.layer} ({call.name}) does not reproduce its own output: it is random or keeps state between "
                "calls, so it has no Jacobian to measure"
            )

    def norm(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        """Keep the first norm that is handed the last block's output itself."""
        if self.calls and self.normed is None and args and isinstance(args[0], Tensor):
            batch_first = self.calls[-1].batch_first
            if self.same_as_last_output(args[0] if batch_first else args[0].transpose(0, 1)):
                normed = output if batch_first else output.transpose(0, 1)
                self.normed = (name, module, normed.to(self.replica.dtype))

    def same_as_last_output(self, x: Tensor) -> bool:
        last = self.calls[-1].y
        return x.shape == last.shape and torch.equal(x.to(last.dtype), last.to(x.device))

    def finished(self) -> Recording:
        reached = {call.name for call in self.calls}
        missed = [name for name in self.replica.description.names if name not in reached]
        if missed:
            raise UsageError(
                f"the forward pass never reached {len(missed)} of the blocks: {', '.join(missed)}; where the model calls "
                "parts of them by itself, name the boundaries between blocks: blocks=[('input of A', 'output of B'), ...]"
            )
        for call in self.calls:
            if call.second_argument is not None:
                residual_pair.check_sum(call)
        if self.normed is None:
            return Recording(self.calls, None, None)
        name, module, normed = self.normed
        self.check_finite(normed, f"the final norm ({name}), after block {len(self.calls)} ({self.calls[-1].name}),")
        return Recording(self.calls, (name, module), normed)

    def check_finite(self, values: Tensor, where: str) -> None:
        if not torch.isfinite(values).all():
            raise FloatingPointError(
                f"{where} gives values that are not finite (overflow or NaN in {self.replica.dtype}); check the weights, "
                "or measure in float64"
            )
