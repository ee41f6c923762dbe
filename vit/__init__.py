"""Train DeiT-style vision transformers over a grid of weight decay x stochastic depth, and relate accuracy to coupling.

Input: a recipe (YAML or options) and the axes of the grid. Output: a directory per cell with accuracy, history and units of
coupling over training; and an analysis of the grid: tables, figures and an HTML page.

| module | contents |
| --- | --- |
| `recipe` | the options of one training run and their validation; `recipes/` has those of the study |
| `train`, `command` | the command `python -m vit.train` |
| `training` | one training run with coupling measured meanwhile |
| `grid` | the command `python -m vit.grid`: all cells, on Ray (`tune`) or local processes (`processes`) |
| `progress` | the loss on plain training images at each measured step |
| `cells` | the files, state and lock of a cell's directory |
| `data`, `augment`, `loaders` | data sets in memory, batched augmentation, data loaders |
| `model`, `module`, `averaging` | timm's DeiT; the LightningModule that trains it; the moving average of its weights |
| `analysis` | the command `python -m vit.analysis`: tables, figures (`figures`) and page of a grid |
| `statistics` | regressions of accuracy on coupling |
"""
