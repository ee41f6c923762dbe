"""Jacobians of recorded blocks at single tokens.

In: a `Recording` and token rows. Out: dense Jacobians or their products, each checked against the full sequence.
"""
