"""Lines that a message proposes for `blocks=`, when the blocks are not found or several lists of them fit.

A line from the module tree is a guess: only a forward pass shows whether the blocks form a chain. Where inputs are known
(`tracker.measure`), each line is tried, and those that fail are listed with the reason instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tracker.errors import UsageError

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
    what: str  # in words

    def __str__(self) -> str:
        return f"\n  blocks={self.argument}  # {self.what}"


class BlocksNotFound(UsageError):
    """No blocks, or several lists of blocks, were found.

    Args:
        found: what was found instead, and what blocks need.
        proposals: blocks that the caller may mean. They have not been tried.
    """

    def __init__(self, found: str, proposals: Sequence[Proposal] = ()) -> None:
        self.found = found
        self.proposals = proposals
        untried = (
            "Name the blocks to measure. These lines were not tried, which takes inputs; tracker.measure(model, inputs) tries "
            f"them and says which work:{''.join(map(str, proposals))}"
        )
        super().__init__(f"{found}\n{untried if proposals else HOW_TO_NAME}")

    def __reduce__(self) -> tuple[type[UsageError], tuple[str]]:
        return UsageError, (str(self),)

    def tried(self, failure: Callable[[Any], str]) -> UsageError:
        """Return the error after trying every proposal.

        Args:
            failure: returns why the blocks can't be measured, or "" if they can.
        """
        # In one line each, without the remedy that the message ends with.
        reasons = [" ".join(failure(one.blocks).removesuffix(HOW_TO_NAME).split()) for one in self.proposals]
        work = "".join(str(one) for one, reason in zip(self.proposals, reasons, strict=True) if not reason)
        failed = "".join(
            f"\n  {one.where} ({one.what}): {reason}"
            for one, reason in zip(self.proposals, reasons, strict=True)
            if reason
        )
        found = f"{self.found}\nTried on these inputs, and not measurable:{failed}" if failed else self.found
        remedy = f"Name the blocks to measure; each line was tried on these inputs:{work}" if work else HOW_TO_NAME
        return UsageError(f"{found}\n{remedy}")
