"""Jacobians of recorded blocks at token rows.

Input: `BlockCall`s and token rows (sample, position). Output: J (R, d, d) of the residual function f = block - 1, checked against
the full sequence.

- `rows`: `Jacobians`, which chooses the fastest path that passes its checks, and keeps their results.
- `restriction`: a block as a function of single rows, or of rows within full sequences.
- `kept`: Jacobians that wait on the device, in the host's memory or in a file.
- `slicing`: token rows, and the parts of a block's arguments and of attention masks that belong to them.
- `row_attention`: attention of single rows with the recorded keys and values of the others.
- `checks`: errors of values and derivatives, and their tolerances; samples of a batch that mix.
- `independent`: comparison of formed Jacobians with differences of the values.
- `witness`: comparison of formed Jacobians with what the caller's model itself computes.
"""
