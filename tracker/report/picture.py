"""The picture at the top of the page: what coupling is, and how it looks in the charts.

Two coupling matrices A = U'ᵀ J V', of a block in the basis of an unrelated block and of a coupled one, and a mis-coupling that
falls below its null level. The numbers are made up.
"""

import numpy as np

K, CELL = 6, 14  # rows of a matrix, pixels of an entry
SIDE = K * CELL
NULL, FALLING = 14, ((4, 14), (24, 14), (36, 20), (48, 44), (60, 58), (80, 62), (116, 58))  # of the sketched curve
WIDTH = 120


def picture() -> str:
    """Return the three drawings as HTML, in the colours of the page."""
    random = np.random.default_rng(1)
    values = np.diag(np.linspace(1, 0.4, K))
    unrelated = abs(random.normal(0, 0.33, (K, K)))
    curve = " ".join(f"{x},{y}" for x, y in FALLING)
    sketch = (
        f'<line x1="4" y1="{NULL}" x2="{WIDTH - 4}" y2="{NULL}" class="null"/><polyline points="{curve}"/>'
        f'<path d="M4 2V{SIDE - 2}H{WIDTH - 4}" class="axes"/>'
    )
    return "".join(
        f'<div><svg viewBox="0 0 {width} {SIDE}" width="{width}" height="{SIDE}" aria-hidden="true">{drawing}</svg>'
        f"<p>{words}</p></div>"
        for width, drawing, words in (
            (SIDE, _matrix(unrelated), "<b>Unrelated blocks:</b> A is spread out, mis-coupling is at its null level."),
            (
                SIDE,
                _matrix(values + abs(random.normal(0, 0.05, (K, K)))),
                "<b>Coupled blocks:</b> A is close to S, mis-coupling is near 0.",
            ),
            (
                WIDTH,
                sketch,
                "<b>In the charts:</b> mis-coupling (line) falls below its null level (dotted) when coupling sets in.",
            ),
        )
    )


def _matrix(values: np.ndarray) -> str:
    return "".join(
        f'<rect x="{CELL * j}" y="{CELL * i}" width="{CELL - 1}" height="{CELL - 1}" fill-opacity="{min(1, value):.2f}"/>'
        for (i, j), value in np.ndenumerate(values)
    )
