"""Plots that read in grey: shades differ in lightness, lines in their markers and dashes, bars in their hatching."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from draftree.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHADES = ("#1f2f5f", "#b35900", "#5f9e6e", "#c9b13c", "#888888", "#d9a5c7", "#404040", "#9ad0e0")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", "-", "--", "-.", ":")
HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++", "oo")


class Plot:
    """A figure in the making.

    Attributes:
        figure: matplotlib's.
        svg: the finished figure.
    """

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.svg = ""


@contextmanager
def plot(name: str, width: float = 6.4, height: float = 4.0) -> Iterator[Plot]:
    """A figure that is turned into SVG at the end; the same every time for the same content."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path", "font.size": 9}):
        made = Plot(Figure(figsize=(width, height), layout="constrained"))
        yield made
        file = io.StringIO()
        made.figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    made.svg = text[text.index("<svg") :]


def line_style(number: int) -> dict[str, Any]:
    """Of the line of that number."""
    n = number % len(SHADES)
    return {"color": SHADES[n], "marker": MARKERS[n], "linestyle": DASHES[n], "markersize": 5}


def bar_style(number: int) -> dict[str, Any]:
    """Of the bars of that number."""
    n = number % len(SHADES)
    return {"facecolor": SHADES[n], "hatch": HATCHES[n], "edgecolor": "white", "linewidth": 0.5}


def check_plots() -> None:
    """Make sure that figures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'draftree[plots]'") from None
