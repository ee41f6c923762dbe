"""Statistics of measured Datasets.

In: Datasets of one step or of many. Out: curve points, intervals, fits and comparisons between models.
"""
