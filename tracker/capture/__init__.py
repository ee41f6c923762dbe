"""Record one forward pass as block calls that can be replayed on other hidden states.

Input: a model, its `Blocks` (`tracker.blocks`) and its inputs. Output: a `Recording`, with one `BlockCall` per block: its
arguments, its input and output states, and the keys and values of its attentions.

- `prepare`: blocks, class token and replica of one measurement.
- `inputs`: prompts, tensors and mappings as checked forward calls.
- `replica`: the copy of the model that runs; `weights`: how it gets the model's weights; `guard`: what it writes stays its own.
- `recorder`: the hooks that record a pass; `recording`: the recorded calls; `spans`: blocks that are no modules.
- `attention`: hooks on a model's attention functions.
- `hidden_state`: the arguments of a block's call and the state in its output.
- `head`: the final norm, the logits and the unembedding, found during the pass.
- `confirm`: blocks, reachability and class token, shown by forward passes; `padding`: read from masks, and confirmed.
- `global_state`, `random_numbers`: process-wide state and generators that a measurement sets and restores.
"""
