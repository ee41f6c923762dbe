"""The colours of figures and of pages, in a light and a dark theme.

Figures use the light theme. `SERIES` colours are those of Okabe and Ito (jfly.uni-koeln.de/color), which colour-blind readers
can tell apart, darker on white where the originals have too little contrast.
"""

from collections.abc import Mapping
from typing import Literal

Theme = Literal["light", "dark"]

SERIES: Mapping[Theme, tuple[str, ...]] = {  # of lines and markers, in this order
    "light": ("#0072B2", "#D55E00", "#007A5A", "#A6477F", "#8A6100", "#2B7FB8", "#1a1d21"),
    "dark": ("#56B4E9", "#E69F00", "#00B386", "#CC79A7", "#F0E442", "#FF8C42", "#e8eaed"),
}
SURFACE: Mapping[Theme, Mapping[str, str]] = {
    "light": {
        "ink": "#1a1d21",  # text
        "faint": "#5a626b",  # captions, error bars
        "line": "#dde1e6",  # rules and grid lines
        "ghost": "#c4c9cf",  # curves in the background
        "paper": "#ffffff",
        "accent": "#0b62a0",  # links, focus
        "warn": "#d55e00",
    },
    "dark": {
        "ink": "#e8eaed",
        "faint": "#a9b1ba",
        "line": "#333a42",
        "ghost": "#515a64",
        "paper": "#14171b",
        "accent": "#6cb8f0",
        "warn": "#ff8c42",
    },
}
BLUE, ORANGE, GREEN, *_ = SERIES["light"]
GREY = SURFACE["light"]["faint"]
# Of mis-couplings, from coupled (last) to uncoupled, and of |A|, from 0 to large (last): viridis, evenly spaced.
SEQUENTIAL = (
    "#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725",
)  # fmt: skip
DIVERGING = ("#67001f", "#d6604d", "#f7f7f7", "#4393c3", "#053061")  # from -1 to 1, evenly spaced


def css_variables(theme: Theme) -> str:
    """Return the declarations of a CSS rule: a variable for each colour of `SURFACE`, and the colour scheme.

    >>> css_variables("light")[:34]
    '--ink: #1a1d21; --faint: #5a626b; '
    """
    return " ".join(f"--{name}: {colour};" for name, colour in SURFACE[theme].items()) + f" color-scheme: {theme};"
