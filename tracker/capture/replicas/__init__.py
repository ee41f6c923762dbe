"""Copy a model for one measurement, so that the caller's model is only read.

Input: an `nn.Module`, its `Blocks`, a dtype and a device. Output: a `Replica`, which runs like the model, in eval mode and in
that dtype.

- `replica`: the copy, and when its parts hold weights.
- `module_copier`: the copied module tree.
- `weights`: parameters as plain tensors: dequantized, gathered from shards, loaded from offloading.
- `sharded`: the agreement of ranks before each weight that is sharded over them is read.
- `streaming`: copies of blocks' weights on an accelerator, made ahead of their use.
- `guard`: copy-on-write for tensors that share the caller's memory.
- `copies`: copies of nested containers and plain data objects.
- `configs`: settings of a model's configuration that the copy needs otherwise.
- `module_state`: attributes of modules besides weights, to detect and restore changes.
"""
