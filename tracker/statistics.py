"""Curves and scalars of results, as every figure, logger and page draws them (`tracker.analysis.statistics`)."""

from tracker.analysis.statistics import curves, scalars

__all__ = ["curves", "scalars"]
