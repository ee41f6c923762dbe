"""The measures and the variables of the Dataset they make.

In: recordings, Jacobians and states. Out: arrays per sample and one labelled Dataset.

- `settings`, `options`: the options; `plan`, `cost`: how a measurement is computed, and what it takes.
- `calls`: the course of a measurement; `states`, `depthwise`, `tokenwise`, `layers`: its parts.
- `coupling`, `trajectory`, `single_blocks`, `block_products`: formulas.
- `declaration`, `registry`, `dataset`: the variables, and the Dataset.
"""
