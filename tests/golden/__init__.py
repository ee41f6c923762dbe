"""Golden results: what the package computes for a dozen small cases, written before a change and compared after it.

`python -m tests.golden write DIR`, then `python -m tests.golden compare BEFORE AFTER`.
"""
