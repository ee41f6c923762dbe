"""A model as a measurement sees it: the names of its parts, the copy of it that runs, and one recorded forward pass.

Input: a model, its `Blocks`, which `tracker.blocks` finds, and its inputs. Output: a `Recording`, with one `BlockCall` per block:
its arguments, its input and output states, and the keys and values of its attentions.

- `description`: `Blocks`, the names of the blocks, the final norm, the unembedding and the class token.
- `boundaries`: blocks that are no modules, named by where they begin and end in the forward pass.
- `wrappers`: the module tree without DDP, `torch.compile` and their like.
- `huggingface`: the blocks, embeddings and towers that a Hugging Face config declares.
- `proposals`: the error for a model without blocks, with the lines for `blocks=` that it proposes.
- `inputs`: prompts, tensors and mappings as checked forward calls; `padding`: read from masks, and confirmed.
- `records`: what a batch of any form consists of, also in words.
- `replica`: the copy of the model that runs; `weights`: how it gets the model's weights; `guard`: what it writes stays its own.
- `recorder`: the hooks that record a pass; `recording`: the recorded calls.
- `attention`: hooks on a model's attention functions.
- `hidden_state`: the arguments of a block's call and the state in its output.
- `head`: the final norm, found during the pass.
- `tail`: what the model computes from the last block's output: the logits, also of other states.
- `global_state`, `random_numbers`: process-wide state and generators that a measurement sets and restores.
"""
