"""Find the residual blocks of a model.

In: an `nn.Module`. Out: `Blocks`, the names of its residual blocks and what was assumed about the model around them.
"""
