"""Measure published training checkpoints one after another.

In: a suite of checkpoints and prompts. Out: one measured Dataset per checkpoint in a store.
"""
