"""Quality over size: a point a model, as SVG without any dependency, or as PNG by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from paceline.measure.plot_file import png_figure

_SIZE = (720, 440)
_MARGIN = (70, 84, 190, 54)
"""Left, top, right (labels of the largest models), bottom."""
_LABEL_HEIGHT = 15
_CHARACTER_WIDTH = 6.6
"""Of a label, on average, rather too much than too little: nobody measures text here."""
_LABEL_CHARACTERS = 44

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
class Line:
    """From one place to another, in pixels; ``kind`` is a class of ``_STYLE``, as in the other shapes."""

    kind: str
    x: float
    y: float
    to_x: float
    to_y: float


@dataclass(frozen=True)
class Dot:
    """Around a place."""

    kind: str
    x: float
    y: float


@dataclass(frozen=True)
class Text:
    """On a base line that begins, ends ("end") or has its middle ("middle") at a place."""

    kind: str
    x: float
    y: float
    text: str


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
    reference = f", reference {shortened(document['reference']['model'], 28)}" if compared else ""
    return Chart(
        title="Quality and size",
        note=f"{tokens:,} tokens of {shortened(document['text'], 36)}{reference}; bars: 95 % intervals",
        y_title="mean KL, nats a token (lower is better)" if compared else "perplexity (lower is better)",
        points=points,
        is_log=compared,
    )


def shapes(chart: Chart) -> list[Line | Dot | Text]:
    """What the chart consists of, in the order in which it is drawn, on an area of ``_SIZE``."""
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

    found: list[Line | Dot | Text] = [
        Text("heading", left, 26, chart.title),
        Text("faint", left, 44, chart.note),
        Text("faint", 6, top - 16, chart.y_title),
    ]
    for tick in y_ticks:
        found.append(Line("grid", left, y_of(tick), width - right, y_of(tick)))
        found.append(Text("faint end", left - 6, y_of(tick) + 4, f"{tick:g}"))
    for tick in x_ticks:
        unit = " MB" if tick == x_ticks[-1] else ""
        found.append(Text("faint middle", x_of(tick), height - bottom + 18, f"{tick:g}{unit}"))
    places = [(x_of(point.x), y_of(point.y)) for point in chart.points]
    labels = [_label(point.label, x + 13) for point, (x, _) in zip(chart.points, places, strict=True)]
    heights = _label_heights(places, labels)
    for point, (x, y), label, label_y in zip(chart.points, places, labels, heights, strict=True):
        if point.low is not None and point.high is not None:
            found.append(Line("reach", x, y_of(point.low), x, y_of(point.high)))
        if abs(label_y - y) > 2:
            found.append(Line("leader", x, y, x + 11, label_y))
        found.append(Dot("point", x, y))
        found.append(Text("", x + 13, label_y + 4, label))
    return found


def draw_svg(chart: Chart) -> str:
    """The chart as an SVG document."""
    width, height = _SIZE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
    ]
    for shape in shapes(chart):
        kind = f'class="{shape.kind}" ' if shape.kind else ""
        match shape:
            case Line():
                parts.append(f'<path {kind}d="M{shape.x:.1f} {shape.y:.1f}L{shape.to_x:.1f} {shape.to_y:.1f}"/>')
            case Dot():
                parts.append(f'<circle {kind}cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="4"/>')
            case Text():
                parts.append(f'<text {kind}x="{shape.x:.1f}" y="{shape.y:.1f}">{escape(shape.text)}</text>')
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


def draw_png(chart: Chart, path: Path) -> None:
    """Writes the chart as PNG. Raises ``UnsupportedError`` without matplotlib."""
    width, height = _SIZE
    figure = png_figure(width, height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    colours = {"grid": "#e3e3e3", "reach": "#2563a8", "leader": "#bbbbbb", "point": "#2563a8", "faint": "#777777"}
    for order, shape in enumerate(shapes(chart)):
        first, _, where = shape.kind.partition(" ")
        colour = colours.get(first, "#333333")
        match shape:
            case Line():
                axes.plot([shape.x, shape.to_x], [shape.y, shape.to_y], color=colour, linewidth=0.8, zorder=order)
            case Dot():
                axes.plot(shape.x, shape.y, "o", color=colour, markersize=5.5, markeredgewidth=0, zorder=order)
            case Text():
                align = {"end": "right", "middle": "center"}.get(where, "left")
                is_heading = first == "heading"
                points, weight = (11.5, "bold") if is_heading else (8.2, "normal")
                # As it stands: a dollar in a name begins no formula.
                axes.text(
                    shape.x, shape.y, shape.text, color=colour, fontsize=points, fontweight=weight, ha=align,
                    va="baseline", zorder=order, parse_math=False,
                )  # fmt: skip
    figure.savefig(path)


def round_ticks(low: float, high: float) -> list[float]:
    """Round numbers around ``low`` to ``high``, at least one step and at most eight or so apart."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * at, 12) for at in range(first, max(last, first + 1) + 1)]


def shortened(text: str, most: int) -> str:
    """``text`` in at most so many characters, its middle left out where it is longer."""
    if len(text) <= most:
        return text
    head = most // 3
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


def _label(text: str, x: float) -> str:
    """What of a label fits between ``x`` and the right edge."""
    return shortened(text, min(_LABEL_CHARACTERS, int((_SIZE[0] - x) / _CHARACTER_WIDTH)))


def _label_heights(places: Sequence[tuple[float, float]], labels: Sequence[str]) -> list[float]:
    """Heights of the labels beside points, each moved down where it would lie on one that is set already."""
    heights: dict[int, float] = {}

    def overlap(one: int, other: int) -> bool:
        """Whether they share a column of pixels."""
        left, right = sorted((one, other), key=lambda at: places[at][0])
        return places[right][0] - places[left][0] < 13 + len(labels[left]) * _CHARACTER_WIDTH

    for at in sorted(range(len(places)), key=lambda index: places[index][1]):
        y = places[at][1]
        for height in sorted(heights[other] for other in heights if overlap(at, other)):
            if abs(height - y) < _LABEL_HEIGHT:
                y = height + _LABEL_HEIGHT
        heights[at] = y
    return [heights[at] for at in range(len(places))]
