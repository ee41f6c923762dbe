"""Words for the singular directions of blocks' Jacobians: which next tokens a step of the last state along them favours.

    logits(u) = M D u        M the unembedding, D the derivative of the final norm at the token's last state x^L

is the change, to first order, of the next token's logits if x^L moves along u. The words of u are the tokens v with the largest
logits. A pair (u_k, v_k) has a sign in common only: it is the one with the larger score of u_k,

    score(u) = max_v (logit_v - mean) / std              over the vocabulary

Its reference is the score of random directions, drawn for each sample: the 0.95 quantile over `RANDOM` of them, of the better of
two signs for u, and of one sign for v. A direction at the residual stream of an early block need not mean what it means at the
last: blocks after it may turn it.

Cost for each token: (2 L N + RANDOM) d times the vocabulary, N directions of each block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tracker.jacobians.slicing import Rows
from tracker.linalg.svd import Triplets
from tracker.linalg.transfer import drawn, to_device
from tracker.measures.declaration import LAYER, OURS, Measure
from tracker.model.recording import Recording
from tracker.model.replica import Replica

DIRECTIONS, WORDS, RANDOM = 5, 5, 256
PARTS = ("out", "in")  # u_k, v_k
QUANTILE = 0.95
NO_WORD = -1  # in place of an id, for a direction whose singular value is 0

Logits = Callable[[Float[Tensor, "R m d"]], Float[Tensor, "R m vocabulary"]]


@dataclass(frozen=True)
class LastStates:
    """The unembedding, by name, and the final norm of a model, at the last states x (R, d) of some rows, with their seeds."""

    replica: Replica
    unembedding: str
    norm: nn.Module | None
    x: Float[Tensor, "R d"]
    seeds: Sequence[int]  # of each row's sample

    def logits(self, directions: Float[Tensor, "R m d"]) -> Float[Tensor, "R m vocabulary"]:
        """Return the change of the logits, to first order, along directions; the weights are there."""
        if self.norm is not None:
            x = self.x[:, None].expand_as(directions).contiguous()
            changes: Any = torch.autograd.functional.jvp(self.norm, x, directions.contiguous())[1]
            directions = changes
        unembedding = self.replica.module.get_submodule(self.unembedding)
        # Without a bias
        return unembedding(directions) - unembedding(torch.zeros_like(directions[:1, :1]))

    def random_directions(self) -> Float[Tensor, "R m d"]:
        """Draw directions for each row, the same for the rows of one sample."""
        by_seed = {
            seed: drawn((RANDOM, self.x.shape[-1]), seed).to(self.x.dtype)
            for seed in set(self.seeds)
        }
        return to_device(self.x.device, torch.stack([by_seed[seed] for seed in self.seeds]))[0]


def heads(recordings: Sequence[tuple[Recording, Rows]]) -> LastStates | None:
    """Return the head of the model that was recorded, at its last states; None if it has no unembedding."""
    first = recordings[0][0]
    replica, unembedding = first.calls[0].replica, first.head
    if unembedding is None:
        return None
    last = [(recording.calls[-1].y, rows) for recording, rows in recordings]
    x = torch.cat([rows.select(y).to(replica.device) for y, rows in last])
    seeds = [
        recording.sample_seeds[b] for recording, rows in recordings for b in rows.sample.tolist()
    ]
    return LastStates(
        replica, unembedding, first.final_norm[1] if first.final_norm else None, x, seeds
    )


def measure_directions(
    head: LastStates, triplets: Sequence[Triplets], memory: int
) -> dict[str, Tensor]:
    """Return the ids of words and the scores of the first directions of each block, over (row, layer, direction, ...).

    Args:
        memory: bytes that logits may take.
    """
    replica = head.replica
    unembedding = replica.module.get_submodule(head.unembedding)
    with (
        torch.no_grad(),
        replica.guard(),
        replica.materialize(unembedding),
        replica.materialize(head.norm),
    ):
        of_random = _scores(head.logits, head.random_directions(), memory)
        # Of the better of two signs, as for u, and of one sign, as for v
        both, one = torch.maximum(*of_random["score"].unbind(-1)), of_random["score"][..., 0]
        values: dict[str, Tensor] = {
            f"direction_{part}_score_null": torch.quantile(scores, QUANTILE, dim=1)
            for part, scores in zip(PARTS, (both, one), strict=True)
        }
        values["direction_random_words"] = of_random["ids"][:, :1, 0]
        by_part: dict[str, list[Tensor]] = {}
        for of_block in triplets:
            pairs = [getattr(of_block, part).mT[:, :DIRECTIONS] for part in "UV"]
            out, into = (_scores(head.logits, directions, memory) for directions in pairs)
            # u and v may be reversed together: 0 as decomposed, 1 both reversed. Words of v follow the sign of u.
            sign = out["score"].argmax(-1, keepdim=True)
            determined = of_block.determined[:, :DIRECTIONS]
            for part, words in zip(PARTS, (out, into), strict=True):
                score = words["score"].gather(-1, sign)[..., 0]
                by_part.setdefault(f"direction_{part}_score", []).append(
                    torch.where(determined, score, torch.nan)
                )
                at = sign[..., None].expand(*sign.shape, words["ids"].shape[-1])
                ids = words["ids"].gather(-2, at)[..., 0, :]
                by_part.setdefault(f"direction_{part}_words", []).append(
                    torch.where(determined[..., None], ids, NO_WORD)
                )
    return values | {name: torch.stack(blocks, 1) for name, blocks in by_part.items()}


def _scores(logits: Logits, directions: Float[Tensor, "R m d"], memory: int) -> dict[str, Tensor]:
    """Return score (R, m, sign) and ids of words (R, m, sign, word) of each direction and of its negative."""
    # How many logits a direction has is known after the first; with the terms between, about four arrays of them are in memory.
    parts, at_once = [], 1
    start = 0
    while start < directions.shape[1]:
        z = logits(directions[:, start : start + at_once])
        z = (z - z.mean(-1, keepdim=True)) / z.std(-1, correction=0, keepdim=True)
        top = [torch.topk(sign * z, min(WORDS, z.shape[-1])) for sign in (1, -1)]
        parts.append(
            (
                torch.stack([t.values[..., 0] for t in top], -1),
                torch.stack([t.indices for t in top], -2),
            )
        )
        start += at_once
        at_once = max(1, memory // (4 * len(z) * z.shape[-1] * z.itemsize))
    score, ids = (torch.cat(of_each, 1) for of_each in zip(*parts, strict=True))
    return {"score": score, "ids": ids}


def in_words(values: dict[str, Any], decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """Return values in which the ids of words are texts; without a tokenizer, they are numbers: "#17, #4"; "" is no word."""
    import numpy as np

    def word(token: int) -> str:
        if decode is None:
            return f"#{token}"
        shown = decode([token]).strip() or repr(decode([token]))
        # Files take no NUL, and a table no line breaks.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)

    def text(ids: Any) -> str:
        return ", ".join(word(int(i)) for i in ids if i != NO_WORD)

    def texts(ids: np.ndarray) -> np.ndarray:
        flat = [text(one) for one in ids.reshape(-1, ids.shape[-1])]
        return np.asarray(flat, dtype=object).reshape(ids.shape[:-1])

    return {
        name: texts(value) if name.endswith("_words") else value for name, value in values.items()
    }


_LOGITS = "logits of the next token, to first order, if xᴸ moves along"


def _declared() -> tuple[Measure, ...]:
    shared: dict[str, Any] = {"option": "directions", "reference": OURS}
    measures = []
    for part, symbol, kind, signs in (
        ("out", "uₖ", "output", "the better of both signs"),
        ("in", "vₖ", "input", "one sign"),
    ):
        score = f"max of ({_LOGITS} {symbol}, minus their mean), / their standard deviation"
        measures += [
            Measure(
                f"direction_{part}_words",
                (*LAYER, "direction"),
                f"words of the {kind} direction",
                formula=f"tokens of the largest {_LOGITS} {symbol}; the sign is that of the larger score of uₖ",
                **shared,
            ),
            Measure(
                f"direction_{part}_score",
                (*LAYER, "direction"),
                f"score of the words of the {kind} direction",
                formula=score,
                **shared,
            ),
            Measure(
                f"direction_{part}_score_null",
                ("token",),
                f"score of the words of random {kind} directions, 0.95 quantile",
                formula=f"score of 256 random directions, {signs}",
                **shared,
            ),
        ]
    words = "words of a random direction"
    return (
        *measures,
        Measure("direction_random_words", ("token", "random"), words, formula=words, **shared),
    )


DECLARED = _declared()
