"""The measures and the variables of the Dataset they make.

In: recordings, Jacobians and states. Out: arrays per sample and one labelled Dataset.
"""
