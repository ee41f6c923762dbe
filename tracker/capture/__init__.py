"""Record one forward pass as block calls that can be replayed on other hidden states.

Input: a model, its `Blocks` (`tracker.blocks`) and its inputs. Output: a `Recording`, with one `BlockCall` per block: its
arguments, its input and output states, and the keys and values of its attentions.

- `inputs`: prompts, tensors and mappings as checked forward calls.
- `arguments`: the arguments of a block's call, by name.
- `special_tokens`: special tokens of text encoders, and the positions that are measured.
- `global_state`: process-wide PyTorch state that a measurement sets and restores.
- `activation_checkpointing`: run checkpointed functions without recomputation.
- `replicas`: the copy of the model that runs, and how it holds weights.
- `attention`: hooks on a model's attention functions.
- `hooked_attention`: attention of TransformerLens models.
- `head`: the final norm, the logits and the unembedding, found during the pass.
- `recorder`: the hooks that record a pass.
- `recording`: the recorded calls.
- `outputs`: the hidden state in a block's output.
- `residual_pair`: blocks that pass their state on as two tensors.
- `spans`: blocks that are no modules, between two boundaries of the forward pass.
- `mixing`: find blocks in which no attention is recognised by name, by what they do.
- `noise`: noise for checks by forward passes.
- `reachability`: check that the blocks reach the model's output.
- `spill`: tensors in memory up to a budget, the others in files.
"""
