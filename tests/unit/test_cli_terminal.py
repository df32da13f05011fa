"""What is drawn on a terminal, and that nothing is drawn anywhere else."""

from __future__ import annotations

import io
import time

import pytest

from paceline.cli import terminal
from paceline.cli.terminal import Progress, dim, table


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_progress_line_shows_share_and_counts() -> None:
    progress = Progress("Getting it", 200, unit="B")
    progress.update(50)
    line = progress.line(3.2, 100)
    assert line.startswith("Getting it █")
    assert " 25% 50 B/200 B 3 s" in line


def test_progress_line_without_a_total_shows_the_time() -> None:
    assert Progress("Loading it").line(7.0, 80) == "Loading it … 7 s"


@pytest.mark.parametrize("width", [1, 10, 20, 40, 80, 200])
@pytest.mark.parametrize("done", [0, 1, 99, 100, 150])
def test_progress_line_never_wraps(width: int, done: int) -> None:
    progress = Progress("A rather long label", 100)
    progress.update(done)
    assert len(progress.line(1000.0, width)) < max(width, 1)


def test_total_may_come_late() -> None:
    progress = Progress("x")
    progress.update(1, 4)
    assert " 25%" in progress.line(0.0, 80)


def test_progress_draws_on_a_terminal_and_wipes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_SHOW_AFTER_S", 0.0)
    stream = FakeTerminal()
    with Progress("Working", 10, stream=stream) as progress:
        progress.update(5)
        deadline_s = time.monotonic() + 10
        while "50%" not in stream.getvalue() and time.monotonic() < deadline_s:
            pass
    assert "50%" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_short_wait_draws_nothing() -> None:
    stream = FakeTerminal()
    with Progress("Working", 10, stream=stream):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", ["file", "dumb"])
def test_nothing_where_nobody_watches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_SHOW_AFTER_S", 0.0)
    stream: io.StringIO = io.StringIO() if kind == "file" else FakeTerminal()
    if kind == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    with Progress("Working", 10, stream=stream) as progress:
        progress.update(5)
    assert stream.getvalue() == ""
    assert dim("text", stream) == "text"


def test_dim_on_a_terminal_unless_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dim("text", FakeTerminal()) == "\x1b[2mtext\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert dim("text", FakeTerminal()) == "text"


def test_table_aligns_columns() -> None:
    lines = table(("name", "tok/s"), [("a", "1.0"), ("longer", "123.4")], right=frozenset({1}))
    assert lines == ["name    tok/s", "─" * 13, "a         1.0", "longer  123.4"]
