"""Token-wise coupling: how one token's Jacobian in a block stands to another's in the same block (paper, section 3.1).

With J_{t1 t2} = d f(X)_{t2} / d x_{t1}, over chosen tokens t_1 < ... < t_T of one prompt:

    self          J_{tt} against J_{t't'}          (Figs 4, 17, 21)
    fixed_input   J_{t_1 t} against J_{t_1 t'}     what the first of them sends to each        (Figs 18, 22)
    fixed_output  J_{t t_T} against J_{t' t_T}     what the last of them takes from each       (Figs 19, 23)

so that a causal model has no zero among them. Cost: 3 T - 2 Jacobians and T^2 coupling matrices a block, three times;
memory: those of one block and kind.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tracker.arguments import Rows
from tracker.dataset import DIMS, TOKENWISE
from tracker.depthwise import Layer, Method, pairs
from tracker.recording import BlockCall, Recording
from tracker.rows import Jacobians
from tracker.svd import triplets_of_each


def tokenwise_couplings(
    jacobians: Jacobians,
    recording: Recording,
    sample: int,
    tokens: Sequence[int],
    ks: Sequence[int],
    method: Method,
    matrices: bool,
) -> dict[str, np.ndarray]:
    """All kinds of every block, at these tokens of a sample, with the dimensions of `dataset.DIMS`."""
    found: dict[str, list[Tensor]] = {}
    first, last = tokens[0], tokens[-1]
    for call in recording.calls:
        ends: list[Tensor] = []  # J of the first and the last token, in which every kind begins or ends
        for kind in TOKENWISE:
            if kind == "self":
                Js = _at(jacobians, call, sample, tokens, tokens)
                ends = [Js[0], Js[-1]]
            elif kind == "fixed_input":
                Js = [ends[0], *_at(jacobians, call, sample, [first] * (len(tokens) - 1), tokens[1:])]
            else:
                Js = [*_at(jacobians, call, sample, tokens[:-1], [last] * (len(tokens) - 1)), ends[1]]
            for name, values in _couplings(Js, ks, method, matrices).items():
                found.setdefault(f"{kind}_{name}", []).append(values)
    axis = {name: DIMS[name].index("layer") for name in found}
    return {name: torch.stack(by_layer, axis[name]).cpu().numpy() for name, by_layer in found.items()}


def _at(
    jacobians: Jacobians, call: BlockCall, sample: int, sources: Sequence[int], targets: Sequence[int]
) -> list[Float[Tensor, "1 d d"]]:
    """J_{t1 t2} for these pairs: all of one token each, or none."""
    if not targets:
        return []
    token, source = (torch.tensor(at, device=jacobians.replica.device) for at in (targets, sources))
    rows = Rows(torch.full_like(token, sample), token, None if list(sources) == list(targets) else source)
    ((J, _),) = jacobians([(call, rows)])
    return list(J.split(1))


def _couplings(
    Js: Sequence[Float[Tensor, "1 d d"]], ks: Sequence[int], method: Method, matrices: bool
) -> dict[str, Tensor]:
    """Of every pair, (k, token, token_other); of every Jacobian null levels, (k, token), and its certificate, (token)."""
    triplets = triplets_of_each(Js, max(ks), "auto" if method == "matrix-free" else method)
    layers = [
        Layer(found, J.matmul, torch.linalg.matrix_norm(J), [], True) for found, J in zip(triplets, Js, strict=True)
    ]
    (values,) = pairs(layers, ks, ("matrices",) if matrices else ())
    for name in ("residual", "complete"):
        values[name] = torch.cat([getattr(found, name) for found in triplets])
    return values
