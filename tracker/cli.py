"""What the command lines of `tracker` and `vit` share: the parser, and texts of their help."""

from checkpoints.arguments import Parser

__all__ = ["CLUSTERS_HELP", "LOG_HELP", "Parser", "summary"]

CLUSTERS_HELP = (
    "results that are not independent, as NAME=CLUSTER,NAME=CLUSTER: each fit is repeated with one point per cluster, its "
    "mean; default: variants of one model, recognised by name (-deduped, -seedN) and size"
)
LOG_HELP = (
    "metrics that loggers receive: headline (about a dozen numbers), workspace (also what the saved workspace of W&B draws), "
    "all, or names with commas between them, such as coupling/mean_offdiag,trajectory/*"
)


def summary(command: type) -> str:
    """Return the description of a command: the docstring of its dataclass, without the arguments."""
    return (command.__doc__ or "").split("Args:")[0]
