"""Figures of measured results: the paper's, and others.

In: stores of results or Datasets, each with a `step` dimension. Out: matplotlib figures with the numbers that they plot;
PDF, PNG and CSV files from `python -m tracker.figures`.

- `registry`: the declaration of each figure: number, title, function, needs
- `selection`: figures by name, and what results lack for them
- `choices`: what the caller chooses of a figure
- `coupling`, `states`, `jacobians`, `matrices`: figures of one result or of several
- `model_comparisons`: figures with one point or row per result, and of prompts
- `drawing`: colours of figures and pages, axes, panels, bands and fitted lines
"""
