"""Find the residual blocks of a model from its module tree and its config, without running it.

Input: an `nn.Module`, and optionally the blocks as the caller names them. Output: `Blocks`, the names of the residual blocks
in order of depth, the final norm, the unembedding and the class token, and which of these were assumed.

- `find`: `find_blocks`, its result `Blocks`, and lists that may be blocks, if no attention is recognised by name.
- `huggingface`: the blocks, embeddings and towers that a Hugging Face config declares.
- `towers`: runs of blocks in any module tree, the tower (encoder, vision model, stage) of each, and proposed lines for `blocks=`.
- `boundaries`: blocks that are no modules, named by where they begin and end in the forward pass.
"""
