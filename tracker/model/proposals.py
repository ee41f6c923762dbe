"""The error for a model without blocks, or with several lists of them; it proposes a line for `blocks=` for each (`Proposal`).

A line from the module tree is a guess: only a forward pass shows whether the blocks form a chain. Where inputs are known
(`tracker.measure`), each line is tried, and those that fail are listed with the reason instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracker.common.errors import UsageError
from tracker.model.boundaries import Span, as_python, chain, read_spans
from tracker.model.description import Blocks

HOW_TO_NAME = (
    "Name the blocks, if the model has any: blocks='path.to.list', or a list of modules, or, if no module is a block, the "
    "boundaries between them, blocks=[('input of A', 'output of B'), ...]"
)


@dataclass(frozen=True)
class Proposal:
    """Blocks that a caller may mean."""

    argument: str  # of `blocks=`, as a Python expression
    blocks: Any  # its value
    where: str  # the list that holds them, or their boundaries
    description: str  # in words

    def __str__(self) -> str:
        return f"\n  blocks={self.argument}  # {self.description}"

    def failed(self, reason: str) -> str:
        """Return the line that says why these can't be measured."""
        return f"\n  {self.where} ({self.description}): {reason}"


def between(places: Sequence[str], description: str) -> Proposal:
    """Propose the spans between boundaries."""
    where = f"{places[0]} to {places[-1]}"
    return Proposal(as_python(read_spans(places) or ()), list(places), where, description)


def chained(blocks: Blocks) -> list[Proposal]:
    """Propose spans in the place of blocks that are modules, each from where the one before ended; of spans, nothing.

    What the model does before a block belongs to its span.
    """
    return [] if blocks.spans else [in_spans(blocks, chain(blocks.names))]


def in_spans(blocks: Blocks, spans: Sequence[Span]) -> Proposal:
    """Propose spans, each of which begins where the one before ended, in the place of blocks or of other spans."""
    return Proposal(
        as_python(spans),
        blocks.between_boundaries(spans),
        f"spans from the {spans[0][0]} to the {spans[-1][1]}",
        f"{len(spans)} spans, each with all that the model does after the one before",
    )


class BlocksNotFound(UsageError):
    """No blocks or several lists of blocks were found, or those that were can't be measured as they are.

    Args:
        finding: what was found instead, and what blocks need.
        proposals: blocks that the caller may mean. They have not been tried.
        remedy: what to do if there are none.
    """

    def __init__(
        self, finding: str, proposals: Sequence[Proposal] = (), remedy: str = HOW_TO_NAME
    ) -> None:
        self.finding = finding
        self.proposals = proposals
        self.remedy = remedy
        untried = (
            "Name the blocks to measure. These lines were not tried, which takes inputs; tracker.measure(model, inputs) tries "
            f"them and says which work:{''.join(map(str, proposals))}"
        )
        super().__init__(f"{finding}\n{untried if proposals else remedy}".rstrip())

    def __reduce__(self) -> tuple[type[UsageError], tuple[str]]:
        return UsageError, (str(self),)


def reason(error: Exception) -> str:
    """Return an error's message in one line, without the remedy that it may end with."""
    text = error.finding if isinstance(error, BlocksNotFound) else str(error)
    if not isinstance(error, UsageError):
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.removesuffix(HOW_TO_NAME).split())
