"""Train DeiT-style vision transformers over a grid of weight decay x stochastic depth, and relate accuracy to coupling.

Input of the commands: a recipe (YAML or options) and the axes of the grid. Output: a directory per cell with accuracy, history
and units of coupling over training; and an analysis of the grid: tables, figures and an HTML page.

| module | contents |
| --- | --- |
| `recipe` | the options of one training run and their validation; `recipes/` has those of the study |
| `train` | the command `python -m vit.train` |
| `grid` | the command `python -m vit.grid`: all cells, one after another or on Ray (`cluster`) |
| `overview` | what training the cells of a grid would take; progress and time left while they train |
| `training` | one training run with coupling measured meanwhile |
| `cells` | the files, state and lock of a cell's directory |
| `data` | data sets in memory and where they come from |
| `augment`, `loaders` | batched augmentation, data loaders |
| `model`, `module` | timm's DeiT, or another model; the LightningModule that trains it |
| `analysis` | the command `python -m vit.analysis`: tables, figures (`figures`) and page of a grid |
| `results`, `statistics` | what the analysis reads of a grid; regressions of accuracy on coupling |
"""
