"""How figures look: one style, colours that colour-blind people tell apart, intervals drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito, 2008
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", "-", "--", "-.")
_STYLE = {
    "figure.dpi": 110, "savefig.dpi": 160, "font.size": 9, "axes.titlesize": 9.5,
    "axes.titlelocation": "left", "axes.labelsize": 9, "legend.fontsize": 8,
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "lines.linewidth": 1.5, "lines.markersize": 4.5, "figure.facecolor": "white",
}  # fmt: skip


def figure(draw: Callable[[Figure], None], caption: str = "") -> Figure:
    """A new figure in the house's style, drawn by `draw`. ImportError tells what to install."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as New
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'rksc[experiments]'") from None
    with matplotlib.rc_context(_STYLE):
        made = New(figsize=(7.0, 3.4), layout="constrained")
        draw(made)
        if caption:
            made.supxlabel(caption, fontsize=6.5, color="#777777", x=0.995, ha="right")
    return made


def style(i: int) -> dict[str, Any]:
    """Colour, marker and line of the i-th series."""
    n = len(COLOURS)
    return {"color": COLOURS[i % n], "marker": MARKERS[i % n], "linestyle": LINES[i % n]}


def band(
    axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], i: int
) -> None:
    """An interval around the i-th series."""
    axes.fill_between(x, low, high, color=COLOURS[i % len(COLOURS)], alpha=0.15, linewidth=0)


def errorbars(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    i: int,
    **look: Any,
) -> None:
    """The i-th series with its intervals."""
    y, below, above = (np.array(v, float) for v in (values, low, high))
    errors = np.clip([y - below, above - y], 0, None)
    axes.errorbar(x, y, yerr=errors, **{"capsize": 2, "elinewidth": 0.9} | style(i) | look)


def bars(
    axes: Axes,
    labels: Sequence[str],
    values: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    i: int = 0,
    of: int = 1,
    name: str | None = None,
) -> None:
    """Horizontal bars with intervals, top to bottom; series i of `of` side by side."""
    height = 0.8 / of
    fill = COLOURS[i % len(COLOURS)]
    y = np.arange(len(labels)) + (i - (of - 1) / 2) * height
    v, below, above = (np.array(x, float) for x in (values, low, high))  # None becomes NaN
    errors = np.clip([v - below, above - v], 0, None)
    axes.barh(y, v, height * 0.92, color=fill, label=name, alpha=0.9)
    axes.errorbar(v, y, xerr=errors, fmt="none", ecolor="#333333", elinewidth=0.9,
                  capsize=1.8)  # fmt: skip
    axes.set_yticks(np.arange(len(labels)), labels)
    if i == 0:
        axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
