"""Charts and tables of an evaluation: every model is there, in its place, and nothing asks for anything outside."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.cli.main import main
from paceline.errors import UnsupportedError
from paceline.measure.quality.chart import (
    Chart,
    Point,
    Text,
    chart_of,
    draw_page,
    draw_png,
    draw_svg,
    round_ticks,
    shapes,
    shortened,
)
from paceline.measure.quality.report import report_of


def model(name: str, num_bytes: int, kl: float | None, **fields: Any) -> dict[str, Any]:
    """What is known of a model; without ``kl`` there is no reference."""
    plain = {
        "model": name,
        "bytes": num_bytes,
        "bits_per_weight": 4.5,
        "perplexity": 20.0 + num_bytes / 1e8,
        "perplexity_ci": [19.0, 22.0],
        "tokens": 5119,
        "path": {"kv_dtype": "f32"},
    }
    if kl is None:
        return plain
    compared = {
        "perplexity_ratio": 1.01,
        "kl_mean": kl,
        "kl_mean_ci": [kl * 0.9, kl * 1.1],
        "kl_median": kl / 2,
        "kl_p99": kl * 9,
        "kl_p999": kl * 20,
        "top1_agreement": 0.9,
    }
    return plain | compared | fields


def evaluation(*models: dict[str, Any], compared: bool = True) -> dict[str, Any]:
    return {
        "text": "a <text>",
        "windows": {"kind": "sliding", "context": 512, "stride": 256, "number": 19},
        "reference": model("big", 538_000_000, None) if compared else None,
        "models": list(models),
    }


MODELS = (
    model("small", 80_000_000, 0.08),
    model("small & <odd>", 81_000_000, 0.079),
    model("same", 538_000_000, 0.0, kl_mean_ci=None),
)


def points(svg: str) -> list[tuple[float, float]]:
    """Where the points are."""
    root = ElementTree.fromstring(svg)
    return [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in root.iter() if one.tag.endswith("circle")]


def test_points_lie_where_their_values_are() -> None:
    svg = draw_svg(chart_of(evaluation(*MODELS)))
    small, odd, same = points(svg)
    assert small[0] < odd[0] < same[0], "by size"
    assert small[1] < odd[1] < same[1], "a smaller loss lies lower"
    assert "small &amp; &lt;odd&gt;" in svg
    heights = [float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)">', svg)]
    assert len(heights) == 3
    assert abs(heights[0] - heights[1]) >= 14, "labels of neighbours do not cover each other"
    assert svg.count('class="reach"') == 2, "no interval, no bar"


def test_long_names_stay_inside_and_cover_no_other() -> None:
    """By the width that a letter has in the fonts of browsers and of matplotlib, 6 pixels on average."""
    name = "out/some-where/a-model-with-a-rather-long-name-gptq-w4-g64-asym"
    crowd = [model(f"{name}-{size}", size * 10**7, 0.004) for size in (8, 9, 10, 30, 31, 54)]
    found = evaluation(*crowd) | {"text": "texts/" + "long" * 30 + ".txt"}
    texts = [shape for shape in shapes(chart_of(found)) if isinstance(shape, Text)]
    assert all(shape.x + 6 * len(shape.text) <= 720 for shape in texts if shape.kind in ("", "faint"))
    labels = [shape for shape in texts if shape.kind == ""]
    assert [label.text[-2:] for label in labels] == ["-8", "-9", "10", "30", "31", "54"]
    for at, one in enumerate(labels):
        for other in labels[at + 1 :]:
            assert abs(one.y - other.y) >= 14 or one.x + 6 * len(one.text) < other.x
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abc…fghijk"


def test_without_a_reference_it_is_perplexity() -> None:
    chart = chart_of(evaluation(model("a", 10**8, None), model("b", 3 * 10**8, None), compared=False))
    assert "perplexity" in chart.y_title
    assert [point.y for point in chart.points] == [21.0, 23.0]
    first, second = points(draw_svg(chart))
    assert first[1] > second[1]


@pytest.mark.parametrize("y", [0.0, 1e-9, 3e-5, 0.3, 1.0, 12.5])
def test_every_value_finds_axes(y: float) -> None:
    for is_log in (False, True):
        chart = Chart("", "", "", [Point("x", 100.0, y, y / 2, y * 2)], is_log)
        ((_, height),) = points(draw_svg(chart))
        assert 84 <= height <= 386.01, "inside of the frame"
        assert len(chart.y_ticks()) >= 2


def test_ticks_are_round_and_hold_the_values() -> None:
    assert round_ticks(0.0, 538.0) == [0, 100, 200, 300, 400, 500, 600]
    assert round_ticks(19.2, 20.1) == [19.2, 19.4, 19.6, 19.8, 20.0, 20.2]
    assert round_ticks(5.0, 5.0)[0] <= 5.0 <= round_ticks(5.0, 5.0)[-1]


def test_page_holds_chart_and_table_and_asks_for_nothing() -> None:
    found = evaluation(*MODELS)
    report = report_of(found)
    assert [row[0] for row in report.rows] == ["big", "small", "small & <odd>", "same"]
    assert all(len(row) == len(report.header) for row in report.rows)
    page = draw_page(chart_of(found), report.header, report.rows, report.notes)
    assert page.count("<tr>") == 5
    assert "<svg" in page
    assert "a &lt;text&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_speeds_are_columns_where_they_were_measured() -> None:
    found = evaluation(*MODELS)
    speeds = {"decode_tokens_per_s": 123.4, "prefill_tokens_per_s": 1234.5}
    for one in (found["reference"], *found["models"]):
        one.update(speeds)
    report = report_of(found)
    assert report.header[-2:] == ["decode", "prefill"]
    assert [row[-2:] for row in report.rows] == [["123", "1,234"]] * 4
    assert all(len(row) == len(report.header) for row in report.rows)


def test_png_is_drawn_by_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    draw_png(chart_of(evaluation(*MODELS, model("$x^$", 90_000_000, 0.01))), path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_png_without_matplotlib_is_an_error_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*(name for name in sys.modules if name.startswith("matplotlib")), "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"paceline\[eval\]"):
        draw_png(chart_of(evaluation(*MODELS)), tmp_path / "plot.png")
    assert main(["eval", "no-such-model", "--plot", str(tmp_path / "plot.png")]) == 1
    assert "paceline[eval]" in capsys.readouterr().err
    assert main(["eval", "no-such-model", "--plot", "plot.jpg"]) == 2
    assert ".png, .html or .svg" in capsys.readouterr().err
    assert main(["eval", "no-such-model", "--plot", str(tmp_path / "nowhere" / "plot.svg")]) == 2
    assert "a directory that exists" in capsys.readouterr().err
