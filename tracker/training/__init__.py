"""Measure a model while it trains.

In: a run of Lightning, of transformers' Trainer, or of a plain loop. Out: one measured Dataset per chosen step, logged and
stored. `run` is the course of a run for all three; `callback`, `transformers` and `watch` connect it.
"""
