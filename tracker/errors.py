"""The error for anything that the caller can fix."""


class UsageError(ValueError):
    """A request that can't be met with this model or these inputs: what was given, what is allowed, what to do."""
