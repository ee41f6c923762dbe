"""Whether the final norm counts as part of the last block: `final_norm="auto"` resolved for a model, with the reason in words."""

from tracker.blocks.find import Blocks
from tracker.capture.recording import Recording
from tracker.common.errors import UsageError
from tracker.common.notices import warn_caller
from tracker.common.values import FinalNorm


def resolve_final_norm(option: FinalNorm, recording: Recording, blocks: Blocks) -> tuple[str, str]:
    """Return the convention, "include", "exclude" or "drop", and why it is used.

    Raises:
        UsageError: if the option asks for what this model does not have.
    """
    norm = recording.final_norm[0] if recording.final_norm else ""
    if option == "include" and not norm:
        raise UsageError(
            "final_norm='include', but no norm layer takes the last block's output in this model; use 'exclude'"
        )
    if option == "drop" and len(recording.calls) < 2:
        raise UsageError("final_norm='drop' leaves the last block out, but the model has only one block")
    if option != "auto":
        return option, "chosen by the caller"
    if not norm:
        return "exclude", "no norm takes the last block's output"
    if blocks.include_final_norm is None:
        if recording.logits is None:
            return "exclude", "not a language model: no logits over a vocabulary follow for each token"
        return "include", f"a language model: {norm} takes the last block's output, {recording.logits} logits follow"
    if not blocks.include_final_norm:
        return "exclude", "not a language model: its blocks are not those of a Hugging Face model of token ids"
    return "include", f"a Hugging Face model of token ids: {norm} takes the last block's output"


def warn_of_missing_norm(recording: Recording, blocks: Blocks) -> None:
    """Warn if a language model maps its last state to logits without a norm that is known."""
    if blocks.include_final_norm is None and recording.logits is not None and recording.final_norm is None:
        warn_caller(
            f"this is a language model ({recording.logits} logits for each token), but no module was found that normalizes the "
            "last block's output. Its measures are those without a final norm (final_norm='exclude') and not comparable to "
            "those of models whose norm is found, such as Hugging Face's. If a function computes the norm, call a module "
            "instead; if a module does, name it: blocks=find_blocks(model, final_norm='NAME')"
        )
