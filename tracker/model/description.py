"""The description of a model: its residual blocks, final norm, unembedding and class token, by name."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from tracker.model.boundaries import Boundary, Span

Named = str | Sequence[str | nn.Module | tuple[str, str]]  # blocks as a caller names them


@dataclass(frozen=True)
class Blocks:
    """A model's residual blocks, final norm, unembedding and class token, by name.

    Names are qualified names within the model without wrappers, such as those of DDP and `torch.compile`.
    """

    names: tuple[str, ...]
    found_by: str
    # Candidates; the recorded pass shows which one takes the last block's output
    final_norms: tuple[str, ...] = ()
    include_final_norm: bool | None = (
        None  # what `final_norm="auto"` means; None: included if logits of each token follow
    )
    # The module that maps a hidden state to logits over a vocabulary
    unembedding: str | None = None
    class_token: int | None = None  # position of the token that the classifier reads, if it has one
    # The parameter that is assumed to be this token, which forward passes have to confirm; None for a token that is stated.
    class_token_parameter: str | None = field(default=None, repr=False)
    batch_first: bool = True
    assumed: tuple[str, ...] = ()  # which of "blocks" and "attention" a forward pass has to confirm
    spans: tuple[Span, ...] = ()  # blocks that are no modules; `names` then names their boundaries
    # Tensors that keep their recorded values while a span is linearized
    fixed: tuple[Boundary, ...] = ()

    def __str__(self) -> str:
        layout = "batch first" if self.batch_first else "sequence first"
        norm = " or ".join(self.final_norms) or "none"
        token = "none" if self.class_token is None else f"position {self.class_token}"
        included = "included by default" if self.include_final_norm else "excluded by default"
        head = self.unembedding or "none"
        if self.include_final_norm is None:
            included = (
                "included by default if measuring finds that logits over a vocabulary follow it"
            )
            head = self.unembedding or "what gives these logits"
        first, last = (
            (self.spans[0][0], self.spans[-1][1]) if self.spans else (self.names[0], self.names[-1])
        )
        fixed = f"fixed: {', '.join(map(str, self.fixed))}; " if self.fixed else ""
        return (
            f"{len(self.names)} blocks, {first} to {last} ({self.found_by}); {fixed}{layout}; "
            f"final norm: {norm} ({included}); unembedding: {head}; class token: {token}"
        )

    def between_boundaries(self, spans: Sequence[Span], fixed: Sequence[Boundary] = ()) -> "Blocks":
        """Return the same with spans as blocks. Recording them checks more than what was assumed of modules."""
        return replace(
            self,
            names=tuple(f"{start} to {end}" for start, end in spans),
            spans=tuple(spans),
            fixed=tuple(dict.fromkeys(fixed)),
            class_token_parameter=None,
            assumed=(),
        )
