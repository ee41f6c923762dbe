"""Measure a model while it trains.

In: a Lightning run. Out: one measured Dataset per chosen step, logged and stored.
"""
