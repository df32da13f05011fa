"""The file that a plot is written to: checked before anything is measured, which may take an hour."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ParameterError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_SUFFIXES = (".png", ".html", ".svg")
"""PNG is drawn by matplotlib, the others without any dependency."""

_DOTS_PER_INCH = 200


def check_plot_file(path: Path) -> None:
    """Raises ``ParameterError`` where no plot can be written to ``path``, and ``UnsupportedError`` for PNG without
    matplotlib."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ParameterError("plot", str(path), "a file that ends in .png, .html or .svg")
    if not path.parent.is_dir() or path.is_dir():
        raise ParameterError("plot", str(path), "a file in a directory that exists")
    if path.suffix == ".png":
        png_figure(1, 1)


def png_figure(width: float, height: float) -> Figure:
    """An empty matplotlib figure whose ``savefig`` writes PNG, in the pixels of the SVG at twice their density. Raises
    ``UnsupportedError`` where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"{error}: matplotlib draws PNG; install it with `pip install paceline[eval]`, or ask for .html or .svg"
        ) from error
    figure = Figure(figsize=(width / 100, height / 100), dpi=_DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    return figure
