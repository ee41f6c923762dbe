"""What is asked of a measurement, checked before a model runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import numpy as np
import torch

from tracker.blocks.find import Blocks
from tracker.capture.inputs import positions, whole_numbers
from tracker.capture.recording import Recording
from tracker.errors import UsageError
from tracker.jacobians.rows import PRECISIONS, Precision
from tracker.measures import registry
from tracker.measures.depthwise import METHODS, Method

RELEASE_K = (10, 30, 50)
MEMORY_BUDGET = 4 << 30  # bytes
USUAL, MEASURES = registry.defaults(), registry.choices()
PAIR_TOKENS = 6
PAIR_LAYERS = 1  # l' = l + 1

FinalNorm = Literal["auto", "include", "exclude", "drop"]


def chosen_measures(measures: str | Sequence[str] | None) -> tuple[str, ...]:
    """What a caller who names one, several, none or "all" means."""
    if measures is None:
        return USUAL
    return (measures,) if isinstance(measures, str) else tuple(measures)


@dataclass(frozen=True)
class Settings:
    """What is asked of a measurement, checked; what depends on the model is resolved against a recording.

    The fields are the arguments of `measure`.
    """

    k: int | Sequence[int] | None = None
    tokens: str | Sequence[int] | None = None
    final_norm: FinalNorm = "auto"
    svd: Method = "auto"
    dtype: torch.dtype = torch.float32
    precision: Precision = "float32"
    memory_budget: int = MEMORY_BUDGET
    measures: tuple[str, ...] = USUAL
    window: int | None = None
    pair_tokens: int | Sequence[int] = PAIR_TOKENS
    pair_layers: int | Sequence[tuple[int, int]] = PAIR_LAYERS

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise UsageError(f"dtype={self.dtype!r}; measurements are made in torch.float32 or torch.float64")
        if self.final_norm not in ("auto", "include", "exclude", "drop"):
            raise UsageError(f"final_norm={self.final_norm!r}; choose 'auto', 'include', 'exclude' or 'drop'")
        if self.svd not in METHODS:
            raise UsageError(f"svd={self.svd!r}; choose from {', '.join(METHODS)}")
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision={self.precision!r}; choose from {', '.join(PRECISIONS)}")
        if self.precision != "float32" and self.dtype != torch.float32:
            raise UsageError(f"precision={self.precision!r} is a way to find Jacobians in float32; leave dtype out")
        if not isinstance(self.memory_budget, int) or self.memory_budget < 1:
            raise UsageError(f"memory_budget={self.memory_budget!r}; give a whole number of bytes")
        if not self.measures or set(self.measures) - {*MEASURES, "all"}:
            raise UsageError(f"measures {', '.join(map(str, self.measures))!r}; choose from all, {', '.join(MEASURES)}")
        if not self.asks("coupling") and (self.asks("vju") or self.asks("matrices")):
            raise UsageError(
                f"measures {', '.join(self.measures)!r}; vju and matrices are of the layer pairs: add 'coupling'"
            )
        if not whole_numbers(self.pair_tokens) or (
            isinstance(self.pair_tokens, (int, Integral)) and self.pair_tokens < 2
        ):
            raise UsageError(f"pair_tokens={self.pair_tokens!r}; give how many, at least 2, or a list of positions")
        if not _is_pairs(self.pair_layers):
            raise UsageError(
                f"pair_layers={self.pair_layers!r}; give how far the block l' that lends the basis is from block l (1: "
                "l' = l + 1), or a list of pairs (l, l') of blocks counted from 1, each l once"
            )
        if self.window is not None and (self.window < 3 or self.window % 2 == 0):
            raise UsageError(f"window={self.window}; a window is an odd number of states, at least 3")

    def asks(self, measure: str) -> bool:
        """Whether this is to be measured."""
        return measure in self.measures or "all" in self.measures

    def beside(self) -> tuple[str, ...]:
        """What is wanted of each pair of Jacobians besides its mis-couplings."""
        return tuple(measure for measure in ("vju", "matrices") if self.asks(measure))

    def pairs_of(self, valid: Sequence[int]) -> list[int]:
        """The positions of a sample, of its valid ones, that are compared: evenly spaced from first to last, or as named."""
        if isinstance(self.pair_tokens, (int, Integral)):
            at = np.linspace(0, len(valid) - 1, min(int(self.pair_tokens), len(valid))).round().astype(int)
            return [valid[i] for i in at]
        return sorted(set(positions(self.pair_tokens, list(valid), None)))

    def basis_layers(self, L: int) -> dict[int, int]:
        """For "tokenwise", of L blocks: each block that is described, and the block that lends it the basis, from 1.

        Empty where "all" was asked for of a single block, which has no other.

        Raises:
            UsageError: if there are no such blocks.
        """
        blocks = range(1, L + 1)
        if isinstance(self.pair_layers, Sequence):
            chosen = {int(l): int(other) for l, other in self.pair_layers}
            there = all(l in blocks and other in blocks for l, other in chosen.items())
        else:
            chosen = {l: l + int(self.pair_layers) for l in blocks if l + int(self.pair_layers) in blocks}
            there = bool(chosen) or (L == 1 and "tokenwise" not in self.measures)
        if not there:
            raise UsageError(
                f"pair_layers={self.pair_layers!r}, but {L} block{'s are' if L > 1 else ' is'} measured; choose blocks from "
                f"1 to {L}, or pair_layers=0: each block in its own basis"
            )
        return chosen

    def memory(self, part: int) -> int:
        """One `part`-th of the memory budget, in scalars."""
        return self.memory_budget // self.dtype.itemsize // part

    def chosen_tokens(self, blocks: Blocks) -> str | Sequence[int]:
        """The class token of models that classify from it, unless something else was asked for."""
        return self.tokens if self.tokens is not None else "last" if blocks.class_token is None else "cls"

    def ks(self, d: int) -> tuple[int, ...]:
        """The numbers of singular vectors, ascending."""
        if self.k is None:
            return tuple(K for K in RELEASE_K if d >= K) or (max(1, d // 2),)
        ks = whole_numbers(self.k)
        if not ks or not all(1 <= K <= d for K in ks):
            raise UsageError(f"k={self.k!r}; each K must be a whole number from 1 to the model's width d = {d}")
        return tuple(sorted(set(ks)))

    def convention(self, recording: Recording, include: bool) -> str:
        """The final-norm convention, where `include` is the model's default."""
        choice = self.final_norm
        if choice == "auto":
            choice = "include" if include and recording.final_norm else "exclude"
        if choice == "include" and recording.final_norm is None:
            raise UsageError(
                "final_norm='include', but no norm layer takes the last block's output in this model; use 'exclude'"
            )
        if choice == "drop" and len(recording.calls) < 2:
            raise UsageError("final_norm='drop' leaves the last block out, but the model has only one block")
        return choice


def _is_pairs(chosen: object) -> bool:
    """Whether this is a distance between blocks, or a list of pairs of blocks of which each first is there once."""
    if isinstance(chosen, Integral):
        return not isinstance(chosen, bool)
    if not isinstance(chosen, Sequence) or isinstance(chosen, str):
        return False
    pairs = [whole_numbers(pair) for pair in chosen]
    return bool(pairs) and all(len(pair) == 2 for pair in pairs) and len({l for l, *_ in pairs}) == len(pairs)
