"""Suites of training checkpoints: what is published, how it is fetched, and one small enough to train in a minute."""
