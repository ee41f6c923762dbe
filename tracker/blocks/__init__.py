"""Find the residual blocks of a model, and prepare it for one measurement.

Input: an `nn.Module`, and optionally the blocks as the caller names them. Output: `Blocks`, the names of the residual blocks in
order of depth, the final norm, the unembedding and the class token, and which of these were assumed; and the replica that is
measured.

- `prepare`: blocks, class token and replica of one measurement.
- `find`: `find_blocks`, the blocks that are named, or the first candidate that holds.
- `candidates`: lists of modules that may be blocks, from the module tree alone; `judge`: what a recorded pass shows of them.
- `towers`: what is around the blocks: norms, the class token of their tower. `lists`: boundaries in lists of lists.
- `chain`: check that the blocks are the whole chain.
- `class_token`: the class token of a text encoder; `tokens`: the tokens of each sample that are measured.
- `reachability`: checks that blocks and class token reach the output.
"""
