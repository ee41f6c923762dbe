"""The expected cost of a measurement, as a dry run returns it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import wrap

WIDTH = 80  # columns of the printed text
LABEL = 12


@dataclass(frozen=True)
class Cost:
    """What a measurement is expected to take; print it to read it.

    Attributes:
        blocks: the blocks, final norm, unembedding and class token that were found.
        samples: number of prompts or images.
        tokens: length of the shortest and of the longest that the model runs on.
        rows: number of tokens whose Jacobians are measured, over all samples.
        final_norm: the convention, "include", "exclude" or "drop", and the norm's module.
        k: the numbers of singular vectors.
        width: the width d of the hidden state.
        method: how singular vectors are found.
        stages: seconds by stage.
        timed: what was timed, in words.
        weights_bytes: bytes of the model's weights.
        peak_bytes: bytes beside the weights at the peak.
        memory_budget: the limit on `peak_bytes` that was asked for.
        not_counted: measures that were not asked for, each of which costs more.
        warnings: what is beyond the budget.
        refused: why the measurement would stop with an error; "" if nothing was found that stops it.
    """

    blocks: str
    samples: int
    tokens: tuple[int, int]
    rows: int
    final_norm: tuple[str, str]
    k: tuple[int, ...]
    width: int
    method: str
    stages: Mapping[str, float]
    timed: str
    weights_bytes: int
    peak_bytes: int
    memory_budget: int
    not_counted: tuple[str, ...]
    warnings: tuple[str, ...] = field(default=())
    refused: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of the whole measurement."""
        return sum(self.stages.values(), 0.0)

    def __str__(self) -> str:
        shortest, longest = self.tokens
        length = f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
        convention, norm = self.final_norm
        lines = [
            ("refused", self.refused),
            ("blocks", self.blocks),
            (
                "inputs",
                f"{self.samples} of {length}; Jacobians at {self.rows} token{'s' if self.rows != 1 else ''} in all",
            ),
            ("final norm", f"{convention}{f' ({norm})' if norm else ''}"),
            ("K", f"{', '.join(map(str, self.k))} of width {self.width}"),
            ("method", self.method),
            ("time", "" if self.refused else f"about {duration(self.seconds)}: {self._stages()}"),
            ("timed", self.timed),
            (
                "memory",
                f"about {size(self.peak_bytes)} beside the weights ({size(self.weights_bytes)}); memory_budget "
                f"{size(self.memory_budget)}",
            ),
            *(("warning", warning) for warning in self.warnings),
            ("not counted", f"{', '.join(self.not_counted)} (not asked for by measures)" if self.not_counted else ""),
        ]
        return "\n".join(["dry run: nothing was measured", *(entry(label, text) for label, text in lines if text)])

    __repr__ = __str__

    def _stages(self) -> str:
        return ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.stages.items())


def entry(label: str, text: str) -> str:
    """Return a labelled text, wrapped to `WIDTH` columns."""
    return "\n".join(
        wrap(
            text,
            WIDTH,
            initial_indent=f"{label:<{LABEL}} ",
            subsequent_indent=" " * (LABEL + 1),
            break_long_words=False,
        )
    )


def duration(seconds: float) -> str:
    """Format seconds to two digits, in a unit that a person reads.

    >>> duration(0.034), duration(7.26), duration(412.0), duration(54321.0)
    ('0.03 s', '7.3 s', '6.9 min', '15 h')
    """
    if seconds < 0.1:
        return f"{seconds:.2f} s"
    value, unit = (
        (seconds / 3600, "h") if seconds >= 3600 else (seconds / 60, "min") if seconds >= 100 else (seconds, "s")
    )
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def size(bytes: int) -> str:
    """Format a number of bytes.

    >>> size(123_456_789), size(4 << 30)
    ('123 MB', '4.29 GB')
    """
    return f"{bytes / 1e9:.3g} GB" if bytes >= 1e9 else f"{bytes / 1e6:.3g} MB"
