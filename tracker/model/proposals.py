"""The error for a model without blocks, or with several lists of them; it proposes a line for `blocks=` for each (`Proposal`).

A line from the module tree is a guess: only a forward pass shows whether the blocks form a chain. Where inputs are known
(`tracker.measure`), each line is tried, and those that fail are listed with the reason instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tracker.common.errors import UsageError

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


class BlocksNotFound(UsageError):
    """No blocks, or several lists of blocks, were found.

    Args:
        finding: what was found instead, and what blocks need.
        proposals: blocks that the caller may mean. They have not been tried.
    """

    def __init__(self, finding: str, proposals: Sequence[Proposal] = ()) -> None:
        self.finding = finding
        self.proposals = proposals
        untried = (
            "Name the blocks to measure. These lines were not tried, which takes inputs; tracker.measure(model, inputs) tries "
            f"them and says which work:{''.join(map(str, proposals))}"
        )
        super().__init__(f"{finding}\n{untried if proposals else HOW_TO_NAME}")

    def __reduce__(self) -> tuple[type[UsageError], tuple[str]]:
        return UsageError, (str(self),)

    def tried(self, failure: Callable[[Any], Exception | None]) -> UsageError:
        """Return the error after trying every proposal, and those of their errors instead of them.

        Args:
            failure: returns why the blocks can't be measured, or None if they can.
        """
        lines = {proposal.argument: proposal for proposal in self.proposals}
        pending, work, failed = list(lines), "", ""
        for line in pending:
            proposal, error = lines[line], failure(lines[line].blocks)
            closer = [
                other
                for other in (error.proposals if isinstance(error, BlocksNotFound) else ())
                if other.argument not in lines
            ]
            lines |= {other.argument: other for other in closer}
            pending += [other.argument for other in closer]
            if error is None:
                work += str(proposal)
            elif not closer:
                failed += f"\n  {proposal.where} ({proposal.description}): {_in_one_line(error)}"
        finding = f"{self.finding}\nTried on these inputs, and not measurable:{failed}" if failed else self.finding
        remedy = f"Name the blocks to measure; each line was tried on these inputs:{work}" if work else HOW_TO_NAME
        return UsageError(f"{finding}\n{remedy}")


def _in_one_line(error: Exception) -> str:
    """Return an error's message without the remedy that it may end with."""
    if isinstance(error, BlocksNotFound):
        return " ".join(error.finding.split())
    text = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    return " ".join(text.removesuffix(HOW_TO_NAME).split())
