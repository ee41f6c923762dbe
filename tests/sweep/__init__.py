"""Every text and vision class of transformers and timm that builds tiny, measured and compared with one autograd graph.

`python -m tests.sweep` writes docs/sweep.md and docs/sweep.csv; `--help` lists the options. Nothing here uses the tracker's
own recording, replay or Jacobians: the comparison is with the caller's own model, run once with gradients on
(`tests/sweep/oracle.py`).
"""
