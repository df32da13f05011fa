"""Quality over size: a point a model, as SVG without any dependency, or as PNG by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from paceline.errors import UnsupportedError

_SIZE = (720, 440)
_MARGIN = (70, 84, 190, 54)
"""Left, top, right (labels of the largest models), bottom."""
_LABEL_HEIGHT = 15

_STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; max-width: 100%; height: auto }
text { fill: #333 } .heading { font-size: 16px; font-weight: 600 } .faint { fill: #777 } .grid { stroke: #e3e3e3 }
.point { fill: #2563a8 } .reach { stroke: #2563a8; stroke-width: 1.5 } .leader { stroke: #bbb }
.end { text-anchor: end } .middle { text-anchor: middle }
@media (prefers-color-scheme: dark) {
  svg { background: #15181c } text { fill: #ddd } .faint { fill: #999 } .grid { stroke: #30353b }
  .point { fill: #6fb1f2 } .reach { stroke: #6fb1f2 } .leader { stroke: #555 }
}
"""


@dataclass(frozen=True)
class Point:
    """A model: ``x`` megabytes, ``y`` its loss of quality, ``low`` to ``high`` the interval of that where known."""

    label: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """Points over axes. Of a logarithmic one (``is_log``) what is not above 0 lies at the bottom."""

    title: str
    note: str
    y_title: str
    points: Sequence[Point]
    is_log: bool

    def x_ticks(self) -> list[float]:
        """Round numbers from 0 to beyond the largest model."""
        return round_ticks(0.0, max(point.x for point in self.points))

    def y_ticks(self) -> list[float]:
        """Powers of ten with 2 and 5 between them, or round numbers around the values."""
        reach = [value for point in self.points for value in (point.y, point.low, point.high) if value is not None]
        if not self.is_log:
            return round_ticks(min(reach), max(reach))
        positive = [value for value in reach if value > 0] or [1e-6, 1e-5]
        first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        ticks = [factor * 10.0**power for power in range(first, last) for factor in steps] + [10.0**last]
        return ticks if first < last else [10.0**first, 10.0 ** (first + 1)]


def chart_of(document: Mapping[str, Any]) -> Chart:
    """Of what ``paceline eval`` found: mean KL where there is a reference, else perplexity, over the bytes loaded."""
    compared = document["reference"] is not None
    name = "kl_mean" if compared else "perplexity"
    points = []
    for model in document["models"]:
        low, high = model[f"{name}_ci"] or (None, None)
        points.append(Point(model["model"], model["bytes"] / 1e6, model[name], low, high))
    tokens = document["models"][0]["tokens"]
    reference = f", reference {document['reference']['model']}" if compared else ""
    return Chart(
        title="Quality and size",
        note=f"{tokens:,} tokens of {document['text']}{reference}; bars: 95 % intervals",
        y_title="mean KL, nats a token (lower is better)" if compared else "perplexity (lower is better)",
        points=points,
        is_log=compared,
    )


def draw_svg(chart: Chart) -> str:
    """The chart as an SVG document."""
    width, height = _SIZE
    left, top, right, bottom = _MARGIN
    x_ticks, y_ticks = chart.x_ticks(), chart.y_ticks()

    def x_of(value: float) -> float:
        return left + (width - left - right) * (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

    def y_of(value: float) -> float:
        if chart.is_log:
            value = math.log10(max(value, y_ticks[0]))
            low, high = math.log10(y_ticks[0]), math.log10(y_ticks[-1])
        else:
            low, high = y_ticks[0], y_ticks[-1]
        return height - bottom - (height - top - bottom) * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<text class="heading" x="{left}" y="26">{escape(chart.title)}</text>',
        f'<text class="faint" x="{left}" y="44">{escape(chart.note)}</text>',
        f'<text class="faint" x="6" y="{top - 16}">{escape(chart.y_title)}</text>',
    ]
    for tick in y_ticks:
        parts.append(f'<path class="grid" d="M{left} {y_of(tick):.1f}H{width - right}"/>')
        parts.append(f'<text class="faint end" x="{left - 6}" y="{y_of(tick) + 4:.1f}">{tick:g}</text>')
    for tick in x_ticks:
        unit = " MB" if tick == x_ticks[-1] else ""
        parts.append(
            f'<text class="faint middle" x="{x_of(tick):.1f}" y="{height - bottom + 18}">{tick:g}{unit}</text>'
        )
    places = [(x_of(point.x), y_of(point.y)) for point in chart.points]
    for point, (x, y), label_y in zip(chart.points, places, _label_heights(places), strict=True):
        if point.low is not None and point.high is not None:
            parts.append(f'<path class="reach" d="M{x:.1f} {y_of(point.low):.1f}V{y_of(point.high):.1f}"/>')
        if abs(label_y - y) > 2:
            parts.append(f'<path class="leader" d="M{x:.1f} {y:.1f}L{x + 11:.1f} {label_y:.1f}"/>')
        parts.append(f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        parts.append(f'<text x="{x + 13:.1f}" y="{label_y + 4:.1f}">{escape(point.label)}</text>')
    return "\n".join([*parts, "</svg>"])


def draw_page(chart: Chart, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The chart and the table as one HTML document that asks for nothing from outside."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    style = (
        ":root { color-scheme: light dark } body { font: 14px system-ui, sans-serif; margin: 2rem }"
        " table { border-collapse: collapse; margin: 1rem 0; white-space: nowrap }"
        " th, td { padding: .3rem .7rem; text-align: right }"
        " th:first-child, td:first-child { text-align: left } tr + tr { border-top: 1px solid #8884 }"
    )
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(chart.title)}</title>',
            f"<style>{style}</style>",
            draw_svg(chart),
            "<table>",
            line(header, "th"),
            *(line(row, "td") for row in rows),
            "</table>",
            *(f"<p>{escape(note)}</p>" for note in notes),
            "</html>",
        ]
    )


def require_matplotlib() -> None:
    """Raises ``UnsupportedError`` where matplotlib, which draws PNG, is not installed."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"{error}: matplotlib draws PNG; install it with `pip install paceline[eval]`, or ask for .html or .svg"
        ) from error


def draw_png(chart: Chart, path: Path) -> None:
    """Writes the chart as PNG. Raises ``UnsupportedError`` without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    y_ticks = chart.y_ticks()
    if chart.is_log:
        axes.set_yscale("log")
    axes.set_xlim(chart.x_ticks()[0], chart.x_ticks()[-1])
    axes.set_ylim(y_ticks[0], y_ticks[-1])
    axes.set_yticks(y_ticks, [f"{tick:g}" for tick in y_ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color="0.9")
    for point in chart.points:
        y = max(point.y, y_ticks[0])
        if point.low is not None and point.high is not None:
            axes.vlines(point.x, max(point.low, y_ticks[0]), point.high, color="#2563a8")
        axes.plot(point.x, y, "o", color="#2563a8")
        axes.annotate(point.label, (point.x, y), xytext=(7, -3), textcoords="offset points", fontsize=8)
    axes.set_xlabel("weights in memory, MB")
    axes.set_ylabel(chart.y_title)
    axes.set_title(f"{chart.title}\n{chart.note}", fontsize=9, loc="left")
    figure.savefig(path)


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers around ``low`` to ``high``, at least one step and at most eight or so apart."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * at, 12) for at in range(first, max(last, first + 1) + 1)]


def _label_heights(places: Sequence[tuple[float, float]]) -> list[float]:
    """Heights of the labels beside points, each moved down where it would lie on one that is set already."""
    heights: dict[int, float] = {}
    for at in sorted(range(len(places)), key=lambda index: places[index][1]):
        x, y = places[at]
        taken = sorted(heights[other] for other in heights if abs(places[other][0] - x) < _MARGIN[2])
        for height in taken:
            if abs(height - y) < _LABEL_HEIGHT:
                y = height + _LABEL_HEIGHT
        heights[at] = y
    return [heights[at] for at in range(len(places))]
