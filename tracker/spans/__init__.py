"""Record and replay blocks that are no modules: spans of the forward pass between two boundaries.

Input: a `Replica` of a model whose `Blocks.spans` are set, and its inputs. Output: a `Recording` of `SpanCall`s, checked.

- `calls`: run a span by replacing the tensor at its start and stopping at its end; follow the values that depend on the inputs.
- `recording`: record the states at all boundaries, and fixed tensors, in one pass.
- `checks`: check that the state at each boundary is the whole hidden state, beside fixed tensors.
"""
