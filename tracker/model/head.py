"""What a model does with the last block's output: the norm that takes it, and the logits that follow.

A norm is known by its class name next to the blocks (`Blocks.final_norms`) or, in models that are not Hugging Face's, by what
it does: a module without matrices that takes the last block's output itself, returns another tensor of its shape, and the same
one when its input is scaled. Logits over a vocabulary are known by what the pass computes: after the last block, the product of
every token's state (or the last token's normed state) with a matrix of as many columns as a table has rows that was looked up
before the first block. So tied weights, heads in plain functions and unusual names are recognised as well.

No final norm is a norm inside a module that takes the last block's output and adds to it: that module is a block, too.

The unembedding is the outermost module that maps the normed states themselves (the last block's output, if no norm takes it) to
these logits. A head in a plain function has none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tracker.model.hidden_state import check_finite, hidden_state
from tracker.model.recording import BlockCall, Recording
from tracker.model.replica import Replica
from tracker.model.state_maps import StateMap, adds, ends, is_alike, may_be_block, state_given

SCALES = 4, 16  # of the root mean square: at both, the epsilon of a norm is negligible
SAME = 1e-2  # of the largest entry
EQUAL_LENGTHS = 1e-5  # relative: the rounding of float32
DISTINCT = 1e-3  # of the largest entry

_FUNCTIONS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)


def has_no_matrices(module: nn.Module) -> bool:
    """Whether all parameters and buffers of a module are vectors or scalars, of whatever shape, if it has any."""
    return all(
        sum(size > 1 for size in t.shape) < 2 for t in (*module.parameters(), *module.buffers())
    )


def is_norm(
    module: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any], output: Tensor
) -> bool:
    """Whether a module that was called with these arguments changes those of the output's shape, and equally at every scale."""

    def scaled(value: Any, scale: float) -> Any:
        alike = isinstance(value, Tensor) and value.shape == output.shape
        if not alike or not value.is_floating_point():
            return value
        root_mean_square = value.square().mean().sqrt()
        return value * (scale / root_mean_square.clamp_min(torch.finfo(value.dtype).tiny))

    def run(scale: float) -> Tensor:
        return module(
            *(scaled(a, scale) for a in args),
            **{name: scaled(a, scale) for name, a in keywords.items()},
        )

    # A module that returns what it was given (dropout in eval mode) changes nothing.
    for value in args:
        if isinstance(value, Tensor) and value.shape == output.shape and torch.equal(value, output):
            return False
    small, large = map(run, SCALES)
    return torch.allclose(small, large, rtol=0, atol=SAME * float(large.abs().max()))


class NormWatch(TorchFunctionMode):
    """What the norms of a running block, or of a part of a pass, have returned.

    Norms are modules without matrices that compute one (`is_norm`), and PyTorch's functions for layer norm and RMS norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trying = False  # whether a module is called again, to see what it computes
        self._returned: list[_Returned] = []

    @contextmanager
    def watch(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Watch the pass that runs in this context, and those of these modules that have no matrices."""
        with ExitStack() as stack:
            # A module that several blocks hold gets one hook.
            without_matrices = {id(one): one for one in modules if has_no_matrices(one)}
            for module in without_matrices.values():
                stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            stack.enter_context(self)
            yield

    def forget(self) -> None:
        """Forget what was returned so far."""
        self._returned = []

    def returned(self, y: Tensor) -> bool:
        """Whether y (..., d) is what a norm returned, or has rows of one length; forget what was returned so far."""
        alike = [
            one for one in self._returned if one.is_unchanged() and one.output.shape == y.shape
        ]
        self.forget()
        same = [(one.output.to(y.dtype) == y).all() for one in alike]
        # One wait for the device
        of_one_length, *same = torch.stack([_have_one_length(y), *same]).tolist()
        # The question runs the norm again: what that returns must not be recorded.
        self.trying = True
        of_norm = any(one.is_of_norm() for one, holds in zip(alike, same, strict=True) if holds)
        self.trying = False
        return of_norm or of_one_length

    def _leave(self, module: nn.Module, args: tuple, keywords: dict, output: Any) -> None:
        if isinstance(output, Tensor) and not self.trying:
            self._returned.append(_Returned(output, output._version, module, args, keywords))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Note what a norm over the last axis returns."""
        output = function(*args, **(kwargs or {}))
        if function in _FUNCTIONS and not self.trying:
            shape = args[1] if len(args) > 1 else (kwargs or {})["normalized_shape"]
            if len(shape) == 1:
                self._returned.append(_Returned(output, output._version))
        return output


@dataclass(frozen=True)
class _Returned:
    """A tensor, and the module that returned it; without a module, the function that did so is a norm."""

    output: Tensor
    version: int
    module: nn.Module | None = None
    args: tuple = ()
    keywords: Any = None

    def is_unchanged(self) -> bool:
        """Whether nothing was written to the tensor since."""
        return self.output._version == self.version

    def is_of_norm(self) -> bool:
        """Whether what returned the tensor is a norm."""
        return self.module is None or is_norm(self.module, self.args, self.keywords, self.output)


def _have_one_length(y: Tensor) -> Bool[Tensor, ""]:
    """Whether the first rows of y (..., d), not all alike, have one length, as a norm without weights gives them."""
    rows = y.flatten(0, -2)[:64]
    lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    differ = (rows - rows[0]).abs().max() > DISTINCT * rows.abs().max()
    return differ & (lengths.max() - lengths.min() <= EQUAL_LENGTHS * lengths.max())


# Vocabularies of table and logits may differ by 1 / PADDING: rows for padding or special tokens
PADDING = 16
IsLastState = Callable[[Tensor], bool]


class HeadHooks:
    """Hooks on a forward pass that find the final norm and the logits.

    Attributes:
        norm: the first norm that took the last block's output: its name, the module and its output (B, n, d).
    """

    def __init__(self, replica: Replica):
        self.replica = replica
        self.norm: tuple[str, nn.Module, Tensor] | None = None
        self._unnamed: tuple[str, nn.Module, Tensor] | None = None
        # After the last block: name, width of the output, and input
        self._heads: list[tuple[str, int, Tensor]] = []
        self._trying = False
        self._operations = _Operations()
        self._state_maps: list[StateMap] = []

    @contextmanager
    def watch(self, is_last_state: IsLastState) -> Iterator[None]:
        """Watch the forward pass that runs in this context.

        Args:
            is_last_state: whether a tensor (B, n, d) is the output of the last block so far. Not an attribute: as a method of
                the object that holds this one, it would make a cycle, which keeps the model's weights until it is collected.
        """
        description = self.replica.description
        with ExitStack() as stack:
            for name in description.final_norms:
                self._hook(stack, name, partial(self._leave_norm, is_last_state))
            if description.include_final_norm is None:
                for name, module in _outside_blocks(self.replica):
                    if name not in description.final_norms and has_no_matrices(module):
                        self._hook(stack, name, partial(self._leave_module, is_last_state))
                    if any(parameter.dim() == 2 for parameter in module.parameters()):
                        self._hook(stack, name, self._leave_head)
                stack.enter_context(self._operations)
            for name, module in () if description.spans else _outside_blocks(self.replica):
                if is_alike(module, self.replica.blocks) or may_be_block(module):
                    self._hook(stack, name, partial(self._leave_state_map, is_last_state))
            yield
        self.norm = self.norm or self._unnamed

    def enter_block(self) -> None:
        """Note that a block begins: what follows is neither an embedding nor a head."""
        self._operations.place = "inside"

    def leave_block(self) -> None:
        """Note that a block ended, and forget what took an earlier block's output."""
        self._operations.place = "after"
        self.norm, self._unnamed, self._heads, self._operations.products = None, None, [], []

    def recording(self, calls: Sequence[BlockCall], seed: int | None) -> Recording:
        """Return the recorded calls, with the final norm, the logits and the unembedding that were found.

        Args:
            seed: of the random numbers that the pass drew; None if it drew none.

        Raises:
            FloatingPointError: if the final norm returned a value that is not finite.
        """
        last = calls[-1].y
        logits = self.logits(*last.shape[:2])
        unembedding = self.unembedding(last, logits)
        if self.norm is None:
            return Recording(
                list(calls), None, None, logits, unembedding, seed=seed, state_maps=self._state_maps
            )
        name, module, normed = self.norm
        normed = normed.to(self.replica.dtype)
        check_finite(
            normed, f"the final norm ({name}), after block {len(calls)} ({calls[-1].name}),"
        )
        norm = name, module
        return Recording(
            list(calls), norm, normed, logits, unembedding, seed=seed, state_maps=self._state_maps
        )

    def logits(self, B: int, n: int) -> int | None:
        """Return the number of logits if the state of each of B x n tokens was mapped to logits over a vocabulary."""
        products = self._operations.products
        return next(
            (columns for rows, columns in products if self._of_each_token(rows, B, n)), None
        )

    def unembedding(self, last_state: Tensor, logits: int | None) -> str | None:
        """Return the name of the module that maps normed states to these logits; None if there is none.

        Args:
            last_state: the last block's output (B, n, d).
            logits: their number, as `logits` returns it.
        """
        states = last_state if self.norm is None else self.norm[2]
        names = (
            name
            for name, width, x in reversed(self._heads)
            if width == logits and _is_part(x, states)
        )
        return next(names, None)  # reversed: a module ends after the modules inside it

    def _of_each_token(self, rows: Tensor, B: int, n: int) -> bool:
        m, rest = divmod(len(rows), B)
        if rest or not 0 < m <= n:
            return False
        if m == n or 1 < m == n - 1:  # of all tokens, or of all that have a next one
            return True
        if self.norm is None:
            return False
        _, _, normed = self.norm
        last = normed[:, -m:]
        return rows.numel() == last.numel() and torch.equal(
            rows.view(last.shape).to(last.dtype), last
        )

    def _hook(self, stack: ExitStack, name: str, leave: Callable[..., None]) -> None:
        module = self.replica.module.get_submodule(name)
        stack.callback(module.register_forward_hook(partial(leave, name), with_kwargs=True).remove)

    def _leave_norm(
        self,
        is_last_state: IsLastState,
        name: str,
        module: nn.Module,
        args: tuple,
        keywords: dict,
        output: Any,
    ) -> None:
        if self.norm is None and self._takes(is_last_state, args, keywords, output):
            self.norm = name, module, self.replica.oriented(output)

    def _leave_module(
        self,
        is_last_state: IsLastState,
        name: str,
        module: nn.Module,
        args: tuple,
        keywords: dict,
        output: Any,
    ) -> None:
        if self._trying or self._unnamed is not None or len(args) + len(keywords) != 1:
            return
        if self._takes(is_last_state, args, keywords, output):
            self._trying = True
            if is_norm(module, args, keywords, output):
                self._unnamed = name, module, self.replica.oriented(output)
            self._trying = False

    def _leave_head(
        self, name: str, module: nn.Module, args: tuple, keywords: dict, output: Any
    ) -> None:
        if self._operations.place != "after" or len(args) + len(keywords) != 1:
            return
        (x,) = (*args, *keywords.values())
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        if 1 < x.dim() < 4 and x.shape[:-1] == output.shape[:-1]:
            x = self.replica.oriented(x) if x.dim() == 3 else x
            self._heads.append((name, output.shape[-1], x))

    def _leave_state_map(
        self,
        is_last_state: IsLastState,
        name: str,
        module: nn.Module,
        args: tuple,
        keywords: dict,
        output: Any,
    ) -> None:
        x = None if self._trying else state_given(module, args, keywords, output)
        if x is None:
            return
        x, y = self.replica.oriented(x), self.replica.oriented(hidden_state(output))
        self._state_maps.append(StateMap(name, ends(x), ends(y)))
        found = (self.norm, self._unnamed)
        outside = [
            None if norm is None or norm[0].startswith(f"{name}.") else norm for norm in found
        ]
        if any(
            norm is not kept for norm, kept in zip(found, outside, strict=True)
        ) and is_last_state(x):
            self._trying = True
            if is_alike(module, self.replica.blocks) or adds(module, args, keywords):
                self.norm, self._unnamed = outside
            self._trying = False

    def _takes(self, is_last_state: IsLastState, args: tuple, keywords: dict, output: Any) -> bool:
        argument = next(iter((*args, *keywords.values())), None)
        if not isinstance(argument, Tensor) or not isinstance(output, Tensor):
            return False
        alike = argument.shape == output.shape and argument.dim() == 3
        return alike and is_last_state(self.replica.oriented(argument))


def _is_part(x: Tensor, states: Tensor) -> bool:
    """Whether x holds the states (B, n, d) of all tokens, or of the first or the last ones, in whatever shape."""
    B, n, d = states.shape
    m, rest = divmod(x.numel(), B * d)
    if rest or x.shape[-1] != d or not 0 < m <= n:
        return False
    rows = x.reshape(B, m, d).to(states)
    return torch.equal(rows, states[:, :m]) or torch.equal(rows, states[:, n - m :])


def _outside_blocks(replica: Replica) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are in no block and contain none, with their names."""
    inside = {id(part) for block in replica.blocks for part in block.modules()}
    blocks = set(map(id, replica.blocks))
    for name, module in replica.module.named_modules():
        if name and id(module) not in inside:
            if not any(id(part) in blocks for part in module.modules()):
                yield name, module


class _Operations(TorchDispatchMode):
    """The operations of a pass: lookups in tables, and products with matrices of as many columns as a table has rows.

    Attributes:
        place: before the first block, inside a block, or after one.
        products: rows (N, d) and number of columns of each product after the last block.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.place: Literal["before", "inside", "after"] = "before"
        self.tables: set[int] = set()  # numbers of rows of those looked up before the first block
        self.products: list[tuple[Tensor, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `WriteGuard`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Note the operation, and run it."""
        schema = getattr(func, "_schema", None)
        name = "" if schema is None else schema.name
        if self.place == "before" and name in ("aten::embedding", "aten::index"):
            if args[0].dim() == 2:
                self.tables.add(len(args[0]))
        elif self.place == "after" and name in _PRODUCTS:
            for rows, columns in _PRODUCTS[name](*args):
                if any(abs(columns - table) <= table // PADDING for table in self.tables):
                    self.products.append((rows, columns))
        return func(*args, **(kwargs or {}))


_PRODUCTS: dict[str, Callable[..., list[tuple[Tensor, int]]]] = {  # rows and number of columns
    "aten::mm": lambda x, W: [(x, W.shape[1])],
    "aten::addmm": lambda bias, x, W: [(x, W.shape[1])],
    # One matrix
    "aten::bmm": lambda x, W: (
        [(x.flatten(0, 1), W.shape[2])] if len(W) == 1 or W.stride(0) == 0 else []
    ),
    # x W^T, or W x^T (`tracker.linalg.linear`)
    "mkldnn::_linear_pointwise": lambda x, W, *_: [(x.flatten(0, -2), len(W)), (W, x.shape[0])],
}
