"""Benchmarks of the cost of a measurement, compared with the published algorithm and with plain matrix products."""
