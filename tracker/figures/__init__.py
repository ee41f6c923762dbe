"""Draw the figures of the paper, and others.

In: stores of results or Datasets. Out: matplotlib figures, and PDF, PNG and CSV files (`python -m tracker.figures`).
"""
