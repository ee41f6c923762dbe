"""The error for a model without blocks, or with several lists of them; it proposes a line for `blocks=` for each (`Proposal`).

A line from the module tree is a guess: only a forward pass shows whether the blocks form a chain. Where inputs are known
(`tracker.measure`, walks), each line is tried, and those that fail are listed with the reason instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tracker.common.errors import UsageError
from tracker.model.boundaries import Boundary, Span, as_python, chain, places, read_spans
from tracker.model.description import Blocks

HOW_TO_NAME = (
    "Name the blocks, if the model has any: blocks='path.to.list', or a list of modules, or, if no module is a block, the "
    "boundaries between them, blocks=[('input of A', 'output of B'), ...]"
)

UNTRIED = (
    "Name the blocks to measure. These lines were not tried, which takes inputs; tracker.measure(model, inputs) tries them and "
    "says which work:"
)
TRIED = "Name the blocks to measure; each line was tried on these inputs:"


@dataclass(frozen=True)
class Proposal:
    """Blocks that a caller may mean."""

    argument: str  # of `blocks=`, as a Python expression
    blocks: Any  # its value
    where: str  # the list that holds them, or their boundaries
    description: str  # in words

    def __str__(self) -> str:
        return f"\n  blocks={self.argument}  # {self.description}"

    @property
    def names(self) -> str:
        """What a walk's --blocks takes: names or boundaries with commas between them."""
        named = places(self.blocks.spans) if isinstance(self.blocks, Blocks) else self.blocks
        return named if isinstance(named, str) else ",".join(named)

    def failed(self, reason: str) -> str:
        """Return the line that says why these can't be measured."""
        return f"\n  {self.where} ({self.description}): {reason}"


def between(named: Sequence[str], description: str) -> Proposal:
    """Propose the spans between boundaries."""
    where = f"{named[0]} to {named[-1]}"
    return Proposal(as_python(read_spans(named) or ()), list(named), where, description)


def chained(blocks: Blocks) -> list[Proposal]:
    """Propose spans in the place of blocks that are modules; of spans, nothing.

    What the model does before a block belongs to its span or, if it is done where the state is added to, after a block.
    """
    if blocks.spans:
        return []
    starts = [Boundary("input", name) for name in (*blocks.names, *blocks.final_norms[:1])]
    by_inputs = [list(pairwise(starts))] if blocks.final_norms else []
    return [in_spans(blocks, spans) for spans in (chain(blocks.names), *by_inputs)]


def in_spans(blocks: Blocks, spans: Sequence[Span]) -> Proposal:
    """Propose spans, each of which begins where the one before ended, in the place of blocks or of other spans."""
    return Proposal(
        as_python(spans),
        blocks.between_boundaries(spans),
        f"spans from the {spans[0][0]} to the {spans[-1][1]}",
        f"{len(spans)} spans, each with all that the model does between its boundaries",
    )


class BlocksNotFound(UsageError):
    """No blocks or several lists of blocks were found, or those that were can't be measured as they are.

    Args:
        finding: what was found instead, and what blocks need.
        proposals: blocks that the caller may mean.
        remedy: what to do if there are none.
        heading: of the proposals.
    """

    def __init__(
        self,
        finding: str,
        proposals: Sequence[Proposal] = (),
        remedy: str = HOW_TO_NAME,
        heading: str = UNTRIED,
    ) -> None:
        self.finding = finding
        self.proposals = proposals
        self.remedy = remedy
        lines = f"{heading}{''.join(map(str, proposals))}"
        super().__init__(f"{finding}\n{lines if proposals else remedy}".rstrip())

    def __reduce__(self) -> tuple[type[UsageError], tuple[str]]:
        return UsageError, (str(self),)


def reason(error: Exception) -> str:
    """Return an error's message in one line, without the remedy that it may end with."""
    text = error.finding if isinstance(error, BlocksNotFound) else str(error)
    if not isinstance(error, UsageError):
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.removesuffix(HOW_TO_NAME).split())
