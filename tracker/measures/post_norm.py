"""Blocks that end in a norm (post-norm), whose mis-couplings and trajectories read differently."""

from tracker.capture.recording import Recording
from tracker.common.notices import warn_caller


def is_post_norm(recording: Recording) -> bool:
    """Whether most blocks return the output of a norm of their residual sum."""
    return 2 * sum(call.ends_in_norm for call in recording.calls) > len(recording.calls)


def warn_of_post_norm(recording: Recording) -> None:
    """Warn that mis-couplings of a post-norm model are far below the null level before any training."""
    if is_post_norm(recording):
        warn_caller(
            "the blocks of this model end in a norm (post-norm, as in BERT): the norm alone gives their Jacobians top singular "
            "vectors in common, so that mis-coupling is far below its null level even untrained. Compare with the same "
            "architecture untrained, not with the null level. A norm also sets the length of every state, so alpha_mean "
            "is about 0 and expodistance is undefined or a constant; read lss. The section on post-norm models in "
            "docs/measurements.md says more"
        )
