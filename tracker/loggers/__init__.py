"""Send measured units to experiment loggers.

In: one measured Dataset per step. Out: scalars, images and tables in Weights & Biases or a Lightning logger.
"""
