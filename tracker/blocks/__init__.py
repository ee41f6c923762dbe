"""Find the residual blocks of a model, and prepare it for one measurement.

Input: an `nn.Module`, and optionally the blocks as the caller names them. Output: `Blocks`, the names of the residual blocks in
order of depth, the final norm, the unembedding and the class token, and which of these were assumed; and the replica that is
measured.

- `prepare`: blocks, class token and replica of one measurement.
- `find`: `find_blocks`, from the module tree and the config, without running the model.
- `towers`: runs of blocks in any module tree, the tower (encoder, vision model, stage) of each, and proposed lines for `blocks=`.
- `lists`: lists that may be blocks, if no attention is recognised by name.
- `behaviour`: blocks found or confirmed by what modules do in a forward pass.
- `class_token`: the class token of a text encoder; `tokens`: the tokens of each sample that are measured.
- `reachability`: checks that blocks and class token reach the output.
"""
