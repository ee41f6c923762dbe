"""The version of the variables of a Dataset: their names and what they mean.

In version 3, variables without a suffix are of the blocks alone, those that end in `_normed` include the final norm, and null
levels are computed from the moments and overlaps of blocks. Datasets of other versions are refused.
"""

from collections.abc import Mapping
from typing import Any

from tracker.common.errors import UsageError

ATTRIBUTE, VERSION = "names_version", 3


def require_version(attrs: Mapping[str, Any], source: object = "the Dataset") -> None:
    """Refuse a measured Dataset whose variables have another meaning.

    Args:
        attrs: its attributes.
        source: what the message calls it, such as its file.

    Raises:
        UsageError: for a Dataset that another version of the package measured.
    """
    found = attrs.get(ATTRIBUTE)
    if found is None or int(found) != VERSION:
        raise UsageError(
            f"{source} was measured by another version of this package: its variables are of version {found or 1}, and this one "
            f"reads version {VERSION}. Measure again, into a new directory"
        )
