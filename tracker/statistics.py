"""Curves and scalars of results, as every figure, logger and page draws them (`tracker.analysis.curves`)."""

from tracker.analysis.curves import curves, scalars

__all__ = ["curves", "scalars"]
