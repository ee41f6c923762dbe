"""The progress bar of a measurement, for a person who waits at a terminal or in a notebook."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm.std import tqdm

DELAY = 3.0  # seconds after which the bar appears; a shorter measurement shows none
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"


@dataclass
class Progress:
    """Count the steps of a measurement: one for each token row, block and stage (Jacobian, singular vectors).

    Args:
        bar: shows the share of the steps that are done; None: nothing is shown.
    """

    bar: "tqdm | None" = None
    done: float = 0.0
    expected: float = 0.0

    def expect(self, steps: float) -> None:
        """Set the number of steps of the whole measurement, as far as it is known."""
        self.expected = steps

    def advance(self, steps: float) -> None:
        """Count finished steps."""
        self.done += steps
        if self.bar is not None and self.expected > 0:
            self.bar.update(min(1.0, self.done / self.expected) - self.bar.n)


@contextmanager
def progress_bar(shown: bool | None) -> Iterator[Progress]:
    """Show a bar if the measurement takes longer than `DELAY`; never on ranks other than 0.

    Args:
        shown: whether to show it. None: on a terminal and in a notebook.
    """
    import torch.distributed as ranks

    first = not (ranks.is_available() and ranks.is_initialized()) or ranks.get_rank() == 0
    if not first or not (is_interactive() if shown is None else shown):
        yield Progress()
        return
    from tqdm.auto import tqdm

    # The bar's unit is the whole measurement, as the number of steps is known exactly only after the last forward pass.
    # Refreshed at every step (miniters), as their number says little about the time; the rate is that of the whole (smoothing).
    options = {"delay": DELAY, "miniters": 0, "smoothing": 0, "bar_format": FORMAT, "leave": False}
    with tqdm(desc="measuring", total=1.0, **options) as bar:
        yield Progress(bar)


def is_interactive() -> bool:
    """Whether a person sees the output: standard error is a terminal, or a notebook shows it."""
    stream = sys.stderr
    return stream is not None and (
        stream.isatty() or type(stream).__module__.startswith("ipykernel")
    )
