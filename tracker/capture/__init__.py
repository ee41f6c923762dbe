"""Record one forward pass as calls of blocks that can be replayed.

In: a model, its `Blocks` and its inputs. Out: `Recording`, one `BlockCall` per block with its input and output states.
"""
