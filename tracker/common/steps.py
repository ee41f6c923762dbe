"""What is known of the steps of a training from their weights: which are untrained, and which repeat others."""

from collections.abc import Mapping

UNTRAINED = "untrained, seed "  # prefix of the revision of an untrained model
ZERO_RATE = (
    "steps 0 and 1 hold the same weights: a warm-up that starts at learning rate zero leaves the weights unchanged"
)


def find_repeats(fingerprints: Mapping[int, str]) -> dict[int, int]:
    """Map each step whose weights repeat an earlier step's to the first step with these weights."""
    first: dict[str, int] = {}
    found = {}
    for step, fingerprint in sorted(fingerprints.items()):
        if fingerprint and first.setdefault(fingerprint, step) != step:
            found[step] = first[fingerprint]
    return found


def describe_repeat(step: int, earlier: int) -> str:
    """Describe in a sentence that two steps have the same weights."""
    if (earlier, step) == (0, 1):
        return ZERO_RATE
    return f"steps {earlier} and {step} hold the same weights in every tensor: at least one of them is mislabelled"
