"""Draws what a load found, as SVG or PNG: how latencies are distributed, tokens a second and requests over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.measure.plot_file import png_figure
from paceline.measure.serving.exchange import LATENCIES, Exchange

_PANEL = (360, 230)
_GAP = (64, 62)
_MARGIN = (56, 92)
_COLUMNS = 3
_MAX_POINTS = 600
"""Of a curve: more would not be seen, and make a large file."""
_BINS = 60

_STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; max-width: 100%; height: auto }
text { fill: #333 } .heading { font-size: 16px; font-weight: 600 } .title { font-weight: 600 } .faint { fill: #777 }
.grid { stroke: #e3e3e3 } .curve { fill: none; stroke: #2563a8; stroke-width: 1.8 }
.mark { stroke: #c2571a; stroke-dasharray: 3 3 } .end { text-anchor: end } .middle { text-anchor: middle }
@media (prefers-color-scheme: dark) {
  svg { background: #15181c } text { fill: #ddd } .faint { fill: #999 } .grid { stroke: #30353b }
  .curve { stroke: #6fb1f2 } .mark { stroke: #f0945a }
}
"""


@dataclass(frozen=True)
class Panel:
    """A curve in its own axes, which begin at 0. ``marks`` are (x, label) of vertical lines; ``is_stepped`` draws
    levels."""

    title: str
    x_unit: str
    x: Sequence[float]
    y: Sequence[float]
    y_max: float | None = None
    marks: Sequence[tuple[float, str]] = ()
    is_stepped: bool = False


@dataclass(frozen=True)
class Drawing:
    """Panels in rows of three, under a title and a note."""

    title: str
    note: str
    panels: Sequence[Panel]

    @classmethod
    def of(cls, exchanges: Sequence[Exchange], started_s: float, ended_s: float, *, title: str, note: str) -> Drawing:
        """A run between two times of the exchanges' clock."""
        answered = [one for one in exchanges if one.succeeded]
        panels = [
            distribution_panel(latency.title, [value_s for one in answered for value_s in latency.values_s(one)])
            for key, latency in LATENCIES.items()
            if key != "tpot_with_ttft"
        ]
        wall_s = max(ended_s - started_s, 1e-9)
        panels += [throughput_panel(answered, started_s, wall_s), running_panel(exchanges, started_s, wall_s)]
        return cls(title, note, panels)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        rows = math.ceil(len(self.panels) / _COLUMNS)
        return _MARGIN[0] + _COLUMNS * (_PANEL[0] + _GAP[0]), _MARGIN[1] + rows * (_PANEL[1] + _GAP[1])

    def corner(self, at: int) -> tuple[int, int]:
        """The left and the top of a panel's curve."""
        row, column = divmod(at, _COLUMNS)
        return _MARGIN[0] + column * (_PANEL[0] + _GAP[0]), _MARGIN[1] + row * (_PANEL[1] + _GAP[1])


def draw_svg(drawing: Drawing) -> str:
    """The SVG document."""
    width, height = drawing.size
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<text class="heading" x="{_MARGIN[0]}" y="30">{escape(drawing.title)}</text>',
        f'<text class="faint" x="{_MARGIN[0]}" y="50">{escape(drawing.note)}</text>',
    ]
    for at, panel in enumerate(drawing.panels):
        left, top = drawing.corner(at)
        drawn.append(f'<g transform="translate({left} {top})">{_drawn(panel)}</g>')
    return "\n".join([*drawn, "</svg>"])


def draw_png(drawing: Drawing, path: Path) -> None:
    """Writes the drawing as PNG, as it looks in a light SVG. Raises ``UnsupportedError`` without matplotlib."""
    width, height = drawing.size
    figure = png_figure(width, height)
    faint: dict[str, Any] = {
        "color": "#777777",
        "fontsize": 8.0,
        "parse_math": False,
    }  # a dollar in a name begins no formula
    figure.text(_MARGIN[0] / width, 1 - 30 / height, drawing.title, fontsize=11.5, fontweight="bold", parse_math=False)
    figure.text(_MARGIN[0] / width, 1 - 50 / height, drawing.note, **faint)
    for at, panel in enumerate(drawing.panels):
        left, top = drawing.corner(at)
        box = (left / width, 1 - (top + _PANEL[1]) / height, _PANEL[0] / width, _PANEL[1] / height)
        axes = figure.add_axes(box, frameon=False)
        axes.set_title(panel.title, loc="left", fontsize=8.2, fontweight="bold")
        if not panel.x:
            axes.set_axis_off()
            axes.text(0, 0.9, "no values", transform=axes.transAxes, **faint)
            continue
        x_ticks, y_ticks = ticks(max(panel.x)), ticks(panel.y_max or max(panel.y))
        axes.set_xlim(0, x_ticks[-1])
        axes.set_ylim(0, y_ticks[-1])
        axes.set_xticks(x_ticks, [f"{tick:g}" for tick in x_ticks[:-1]] + [f"{x_ticks[-1]:g} {panel.x_unit}"])
        axes.set_yticks(y_ticks, [f"{tick:g}" for tick in y_ticks])
        axes.tick_params(length=0, labelsize=8, labelcolor="#777777")
        axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
        axes.plot(panel.x, panel.y, color="#2563a8", drawstyle="steps-post" if panel.is_stepped else "default")
        for x, _ in panel.marks:
            axes.axvline(x, color="#c2571a", linewidth=0.8, linestyle="--")
        if panel.marks:
            axes.set_title(_marks_text(panel), loc="right", **faint)
    figure.savefig(path)


def distribution_panel(title: str, values_s: Sequence[float]) -> Panel:
    """The share of values that are at most x milliseconds."""
    if not values_s:
        return Panel(title, "ms", (), ())
    values = np.sort(np.asarray(values_s, np.float64)) * 1e3
    shares = np.arange(1, len(values) + 1) / len(values)
    chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int))
    marks = [(float(np.percentile(values, at)), f"p{at}") for at in (50, 95, 99)]
    x, y = [float(values[0]), *values[chosen].tolist()], [0.0, *shares[chosen].tolist()]
    return Panel(f"{title}, share up to x", "ms", x, y, 1.0, marks, is_stepped=True)


def throughput_panel(answered: Sequence[Exchange], started_s: float, wall_s: float) -> Panel:
    """Output tokens a second; the tokens of an answer are divided equally among its chunks."""
    times = [time_s - started_s for one in answered for time_s in one.chunk_s]
    weights = [one.output_tokens / len(one.chunk_s) for one in answered for _ in one.chunk_s]
    counts, edges = np.histogram(times, _BINS, (0.0, wall_s), weights=weights)
    return Panel("output tokens a second", "s", *_levels(edges, counts * _BINS / wall_s), is_stepped=True)


def running_panel(exchanges: Sequence[Exchange], started_s: float, wall_s: float) -> Panel:
    """Requests that had been sent and had no whole answer yet, on average over each bin."""
    edges = np.linspace(0.0, wall_s, _BINS + 1)
    running = np.zeros(_BINS)
    for one in exchanges:
        if one.failure is not None:
            continue
        begin = one.sent_s - started_s
        end = one.last_s - started_s if one.succeeded else wall_s
        running += np.clip(np.minimum(end, edges[1:]) - np.maximum(begin, edges[:-1]), 0.0, None)
    return Panel("requests running", "s", *_levels(edges, running * _BINS / wall_s), is_stepped=True)


def _levels(edges: NDArray[np.float64], heights: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """The points of a stepped curve, each level from its edge on."""
    return edges.tolist(), [*heights.tolist(), float(heights[-1])]


def _drawn(panel: Panel) -> str:
    width, height = _PANEL
    parts = [f'<text class="title" x="0" y="-12">{escape(panel.title)}</text>']
    if not panel.x:
        return parts[0] + '<text class="faint" x="0" y="20">no values</text>'
    x_ticks, y_ticks = ticks(max(panel.x)), ticks(panel.y_max or max(panel.y))
    x_scale, y_scale = width / x_ticks[-1], height / y_ticks[-1]
    for tick in y_ticks:
        y = height - tick * y_scale
        parts.append(f'<path class="grid" d="M0 {y:.1f}H{width}"/>')
        parts.append(f'<text class="faint end" x="-6" y="{y + 4:.1f}">{tick:g}</text>')
    for tick in x_ticks:
        unit = f" {panel.x_unit}" if tick == x_ticks[-1] else ""
        parts.append(f'<text class="faint middle" x="{tick * x_scale:.1f}" y="{height + 17}">{tick:g}{unit}</text>')
    points = [f"{x * x_scale:.1f} {height - y * y_scale:.1f}" for x, y in zip(panel.x, panel.y, strict=True)]
    path = f"M{points[0]}" + "".join(
        f"H{point.split()[0]}V{point.split()[1]}" if panel.is_stepped else f"L{point}" for point in points[1:]
    )
    parts.append(f'<path class="curve" d="{path}"/>')
    parts += [f'<path class="mark" d="M{x * x_scale:.1f} 0V{height}"/>' for x, _ in panel.marks]
    if panel.marks:
        # Above the panel and not beside the lines, which may lie close together.
        parts.append(f'<text class="faint end" x="{width}" y="-12">{_marks_text(panel)}</text>')
    return "".join(parts)


def _marks_text(panel: Panel) -> str:
    return " · ".join(f"{label} {x:,.1f}" for x, label in panel.marks)


def ticks(largest: float) -> list[float]:
    """Round numbers from 0 to one that is not below ``largest``, four to eight steps apart."""
    if largest <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(largest / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if largest / (step * factor) <= 8)
    return [round(step * at, 12) for at in range(math.ceil(largest / step - 1e-9) + 1)]
