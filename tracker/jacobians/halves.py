"""The Jacobians of the two halves of a block, attention and MLP, where its modules show them.

    attention   J_A, the Jacobian of the block with the MLP's output held at its value
    MLP         J_M, the Jacobian of the block with the attention's output held at its value

A module's output is held by detaching it: the values stay those of the recorded pass, so that all checks of `rows` apply to a
half as to the block. What the names of modules suggest is accepted only if one of two identities holds,

    parallel (GPT-NeoX)     J = J_A + J_M
    sequential (pre-norm)   I + J = (I + J_M) (I + J_A)         J_M at the state after the attention

to the tolerance of the checks. Otherwise there are no halves, and the reason is kept. Cost: the two halves together take as many
products as the block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tracker.common.errors import UsageError
from tracker.jacobians.restriction import CallRows
from tracker.jacobians.rows import Jacobians
from tracker.linalg.precision import tolerance
from tracker.spans.calls import SpanCall

NAMES = {  # of the modules
    "attention": ("attn", "attention", "self_attn", "self_attention", "attention_layer"),
    "mlp": ("mlp", "ffn", "ff", "feed_forward", "feedforward", "block_sparse_moe", "moe"),
}

Matrices = Float[Tensor, "R d d"]


class HalfJacobians:
    """Jacobians of blocks' halves. `Jacobians.without_halves` keeps, by layer, why a block has none."""

    def __init__(self, jacobians: Jacobians) -> None:
        # A half is another function than its block: checks are made and kept for each. It detaches tensors, so its derivative
        # is not that of its values; the identities below compare it with the block's.
        replica, precision, memory = jacobians.replica, jacobians.precision, jacobians.memory
        self._of = {
            name: Jacobians(replica, precision, memory, derivative="autograd") for name in NAMES
        }
        self.missing = jacobians.without_halves

    def __call__(self, selections: Sequence[CallRows], J: Matrices) -> dict[str, Matrices] | None:
        """Return "attention" and "mlp" of a block whose Jacobians at the same rows are J; None if it does not show them."""
        call = selections[0][0]
        if isinstance(call, SpanCall):
            return self._none(call.layer, "it is no module")
        held: dict[str, nn.Module] = {}
        for half, other in (("mlp", "attention"), ("attention", "mlp")):
            child = next(
                (child for name, child in call.block.named_children() if name in NAMES[other]), None
            )
            if child is None:
                return self._none(
                    call.layer, f"no module of it is named {' or '.join(NAMES[other])}"
                )
            held[half] = child
        parts = {}
        for name, jacobians in self._of.items():
            try:
                with _detached(held[name]):
                    parts[name] = torch.cat([part for part, _ in jacobians(selections)])
            # A block that does not depend on its state once one output is held
            except UsageError as error:
                return self._none(
                    call.layer,
                    f"it can't be differentiated by {name} alone ({error.__cause__ or error})",
                )
        if not _add_up(J, parts["attention"], parts["mlp"]):
            return self._none(
                call.layer,
                "its Jacobian is neither the sum nor the product of those of the two modules",
            )
        return parts

    def _none(self, layer: int, reason: str) -> None:
        self.missing[layer] = reason


@contextmanager
def _detached(module: nn.Module) -> Iterator[None]:
    """Detach a module's output."""

    def detach(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach()
        return type(value)(map(detach, value)) if type(value) in (tuple, list) else value

    handle = module.register_forward_hook(lambda module, arguments, output: detach(output))
    try:
        yield
    finally:
        handle.remove()


def _add_up(J: Matrices, attention: Matrices, mlp: Matrices) -> bool:
    """Whether the block adds its halves in parallel at every row, or in sequence at every row."""
    allowed = tolerance(J.dtype, rounded=True) * torch.linalg.matrix_norm(J)
    rest = J - attention - mlp
    # In sequence: I + J = (I + J_M) (I + J_A), without the identity, beside which J may be small
    return any(
        bool((torch.linalg.matrix_norm(left) <= allowed).all())
        for left in (rest, rest - mlp @ attention)
    )
