"""What a model computes from the last block's output: recorded as calls of functions, which later get other states.

    logits(x), x (r, m, d)        logits(x^L) are the model's own

PyTorch's functions are recorded after the last block, with their arguments. When they are called again, what was computed from
the last state is replaced by what the same calls return now; other tensors, such as weights, are those of the pass. States take
the places of tokens that have logits, so that a model which computes them for its last token alone gives those of all.

That this gives the model's logits, and those of one token each, is tested on the last states. It is not claimed of passes that
read values of tensors into Python or write to other tensors.

Logits over a vocabulary are known by what the pass computes: a product of every token's state (or the last tokens') with a matrix
of as many rows or columns as a table has rows that was looked up before the first block. So tied weights, heads in plain
functions and unusual names are recognised as well.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tracker.devices import raise_device_errors
from tracker.model.hidden_state import floating_tensors, named_values, tensors_in
from tracker.model.replica import Replica

PADDING = 16  # vocabularies may differ by 1 / PADDING: rows for padding or special tokens
EQUAL = 1e-4  # nats
LOOKUPS = ("embedding", "__getitem__")
READING = (
    *("item", "tolist", "numpy", "equal", "allclose", "data_ptr"),
    *("__array__", "__bool__", "__int__", "__float__", "__index__"),
)
NO_UNEMBEDDING = (
    "no unembedding was found in this model: name the module that maps a hidden state to logits, "
    "blocks=find_blocks(model, unembedding=...)"
)
NO_LOGITS = (
    "logits of states before the last are not known: after its blocks, the model {}. Let it return the logits of each token, "
    "computed from its state by PyTorch's functions"
)


class _Call(NamedTuple):
    function: Any
    given: tuple[tuple, dict]
    output: Any

    def made(self) -> list[Tensor]:
        """Return the tensors that it returned; of an assignment, which returns none, the one that it wrote to."""
        return tensors_in(self.output) or tensors_in(self.given)[:1]


class Tail(TorchFunctionMode):
    """The functions that a running pass calls on what it computes from the last block's output.

    Attributes:
        paused: whether what runs is a block, or this package's own code.
        tables: numbers of rows of the tables that were looked up before the first block.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.replica = replica
        self.tables: set[int] = set()
        self.begin(None)

    def begin(self, state: Tensor | None) -> None:
        """Record from now on what is computed from a state, as the model holds it; forget what was recorded."""
        self.paused = False
        self._state: Any = state
        self._calls: list[_Call] = []
        self._product: Any = None
        self._logits: Any = None
        # By id. Kept alive, so that ids are not reused
        self._derived = {id(state): state}
        self._unrepeatable = ""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Note a lookup before the blocks, or a call on what was computed from the last state."""
        given = args, kwargs or {}
        tensors = [] if self.paused else tensors_in(given)
        if self._state is None and function.__name__ in LOOKUPS and len(tensors) > 1:
            self.tables |= {len(t) for t in tensors if t.dim() == 2 and t.is_floating_point()}
        others = [t for t in tensors if id(t) not in self._derived]
        if len(others) == len(tensors):
            return function(*args, **given[1])
        versions = [t._version for t in others]
        output = function(*args, **given[1])
        if function.__name__ in READING or versions != [t._version for t in others]:
            self._unrepeatable = (
                f"reads values into Python, or writes to another tensor ({function.__name__})"
            )
        self._calls.append(_Call(function, given, output))
        self._derived |= {id(t): t for t in self._calls[-1].made()}
        return output

    def find_logits(self, x: Float[Tensor, "B n d"], output: Any) -> int | None:
        """Find the logits in what the model returned; return how many each token has, None if they are not over a vocabulary.

        Args:
            x: the last block's output.
        """
        values = named_values(output)
        named: Any = values.get("logits") if isinstance(values, Mapping) else None
        derived = [y for y in (named, *floating_tensors(output)) if id(y) in self._derived]
        n = x.shape[1]
        for call in self._calls:
            z, given = call.made()[0], tensors_in(call.given)
            V = z.shape[-1] if z.dim() > 1 else 0
            matrices = [W for W in given if W.dim() == 2 and id(W) not in self._derived]
            over_vocabulary = any(_is_vocabulary(V, table) for table in self.tables)
            if not over_vocabulary or not any(V in W.shape for W in matrices):
                continue
            m = z[..., 0].numel() / len(x)
            # Those of all tokens, or of all that have a next one, need no trial.
            if m == n or 1 < m == n - 1 or self._gives(z, x.to(z)):
                like = (y for y in derived if y.dim() and _is_vocabulary(y.shape[-1], V))
                self._product, self._logits = z, next(like, None)
                if self._logits is not None:
                    break
        return None if self._product is None else self._product.shape[-1]

    def leads_to_logits(self, value: Tensor) -> bool:
        """Whether the logits were computed from a tensor of the pass."""
        needed = {id(self._product)}
        for call in reversed(self._calls):
            if any(id(t) in needed for t in call.made()):
                needed |= {id(t) for t in tensors_in(call.given)}
        return id(value) in needed

    def check(self, x: Float[Tensor, "B n d"]) -> str:
        """Return why the model's logits of its last states x can't be computed again; "" if they can."""
        if self._product is None:
            return NO_UNEMBEDDING
        if self._logits is None:
            return NO_LOGITS.format("returns none over the vocabulary")
        if not self._unrepeatable and not self._gives(self._logits, x):
            self._unrepeatable = "computes others when its functions are called again"
        return self._unrepeatable and NO_LOGITS.format(self._unrepeatable)

    def logits(self, X: Float[Tensor, "r m d"]) -> Float[Tensor, "r m vocabulary"]:
        """Return the logits that the model would have computed had the last block returned these states."""
        return self._again(self._logits, X.flatten(0, 1)).unflatten(0, X.shape[:2])

    def _gives(self, z: Tensor, x: Float[Tensor, "B n d"]) -> bool:
        """Whether a tensor of the pass is of the last tokens of x, or of all that have a next one, and of each alone."""
        n = x.shape[1]
        m, rest = divmod(z[..., 0].numel(), len(x))
        if rest or not 0 < m <= n:
            return False
        self._read = range(m) if 1 < m == n - 1 else range(n - m, n)
        rows, own = x[:, self._read].flatten(0, 1), z.reshape(len(x) * m, -1)
        # Half of them, each twice and at other places
        at = torch.arange(len(rows), device=x.device).flip(0) // 2
        try:
            again = self._again(z, rows[at])
        # Of any type: functions get states that the model did not compute
        except Exception as error:
            raise_device_errors(error)
            return False
        return torch.allclose(again, own[at], atol=EQUAL)

    def _again(self, z: Tensor, rows: Float[Tensor, "N d"]) -> Float[Tensor, "N v"]:
        """Return what the pass would have computed in the place of z for each row; it takes as many states as it took."""
        own, m = self.replica.oriented(self._state), len(self._read)
        B, _, d = own.shape
        if len(rows) > B * m:
            return torch.cat([self._again(z, part) for part in rows.split(B * m)])
        held = pad(rows, (0, 0, 0, B * m - len(rows))).view(B, m, d).to(self._state.dtype)
        # Tokens that have no logits keep their states.
        whole = torch.cat([own[:, : self._read.start], held, own[:, self._read.stop :]], 1)
        now = {id(self._state): self.replica.oriented(whole).contiguous()}
        # What it writes must not reach the caller's tensors.
        with self.replica.guard():
            for call in self._calls:
                args, keywords = tree_map(lambda value: now.get(id(value), value), call.given)
                output = call.function(*args, **keywords)
                for old, new in zip(tensors_in(call.output), tensors_in(output), strict=True):
                    now[id(old)] = new
        return now[id(z)].reshape(B * m, -1)[: len(rows)]


def _is_vocabulary(logits: int, table: int) -> bool:
    return abs(logits - table) <= table // PADDING
