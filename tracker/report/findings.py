"""What the curves of one store say, in a sentence: when coupling begins, when it is strongest, and what is left at the end."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tracker.measures.registry import MISCOUPLINGS


def findings(contents: Mapping[str, Any]) -> str:
    """Describe the curve that the page shows first: the first measure, the smallest K, pairs of different blocks.

    Args:
        contents: what `tracker.report.contents.contents` returns.

    Returns:
        A sentence, "" where fewer than two steps have a value.
    """
    name = next((name for name in MISCOUPLINGS if name in contents["curves"]), None)
    if name is None or contents["layers"] < 2:
        return ""
    k = min(contents["ks"])
    curve = contents["curves"][name][k]["mean_offdiag"]
    value, null = (np.array(curve[part], float) for part in ("value", "null"))
    steps = np.array(contents["steps"])
    defined = np.isfinite(value) & np.isfinite(null)
    steps, value, null = steps[defined], value[defined], null[defined]
    if len(steps) < 2:
        return ""
    begins = contents["onset"][name][k]
    if not np.isfinite(np.array(begins["later"], float)):
        return f"Mis-coupling (K = {k}, mean over pairs of different blocks): onset of coupling {begins['words']}."
    strongest = int((null - value).argmax())
    said = f"Coupling begins {begins['words'].partition(' (')[0]}"
    said += f" and is strongest at step {steps[strongest]:,}: mis-coupling is {value[strongest]:.2f} there, "
    said += f"the null level {null[strongest]:.2f}"
    if strongest < len(steps) - 1:
        said += f"; at the last step, {steps[-1]:,}, they are {value[-1]:.2f} and {null[-1]:.2f}"
    return f"{said} (K = {k}, mean over pairs of different blocks)."
