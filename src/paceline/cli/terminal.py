"""What commands draw on a terminal: dim text, a progress bar, a table. On anything else only plain text."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

_REDRAW_S = 0.1
_SHOW_AFTER_S = 0.4
"""A wait shorter than this needs no sign of life."""


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches the stream, so that it may be redrawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def styled(text: str, code: str, stream: TextIO) -> str:
    """``text`` in an ANSI style, unchanged where the stream is no terminal or NO_COLOR is set."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def dim(text: str, stream: TextIO) -> str:
    """Dimmed, for what is not the answer itself."""
    return styled(text, "2", stream)


def bold(text: str, stream: TextIO) -> str:
    """Bold, for headings."""
    return styled(text, "1", stream)


class Progress:
    """A line on standard error that shows that something goes on and how far it is; nothing when that is no terminal.

    Used as a context manager. ``update`` sets the count, from any thread; without a total only the time is shown. The
    line appears after 0.4 s and is wiped at the end.
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        *,
        unit: str = "",
        estimate: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        """``estimate`` shows how long it may still take, for work whose parts take alike."""
        self._label = label
        self._total = total
        self._unit = unit
        self._estimate = estimate
        self._stream = sys.stderr if stream is None else stream
        self._done = 0
        self._started_s = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, done: int, total: int | None = None) -> None:
        """Sets how much is done, and the total where it was not known before."""
        self._done = done
        if total is not None:
            self._total = total

    def __enter__(self) -> Progress:
        if is_terminal(self._stream):
            self._thread = threading.Thread(target=self._draw, name="paceline-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def line(self, elapsed_s: float, width: int) -> str:
        """The line as drawn after that time on a terminal of that width."""
        if not self._total:
            return f"{self._label} … {elapsed_s:.0f} s"[: width - 1]
        share = min(1.0, self._done / self._total)
        counts = f" {_scaled(self._done, self._unit)}/{_scaled(self._total, self._unit)} {elapsed_s:.0f} s"
        if self._estimate and 0 < share < 1:
            counts += f", {_duration(elapsed_s * (1 - share) / share)} left"
        cells = max(5, min(30, width - len(self._label) - len(counts) - 8))
        full = int(share * cells)
        return f"{self._label} {'█' * full}{'░' * (cells - full)} {share:4.0%}{counts}"[: width - 1]

    def _draw(self) -> None:
        import shutil  # brings compression libraries that the first token need not wait for

        drawn = False
        wait_s = _SHOW_AFTER_S
        while not self._stop.wait(wait_s):
            width = shutil.get_terminal_size().columns
            text = self.line(time.monotonic() - self._started_s, width)
            self._stream.write(f"\r\x1b[K{dim(text, self._stream)}")
            self._stream.flush()
            drawn, wait_s = True, _REDRAW_S
        if drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Lines of a table: the header, a rule, a line a row; columns in ``right`` are aligned to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(w) if at in right else cell.ljust(w)
            for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(header), "─" * len("  ".join("x" * width for width in widths)), *(line(row) for row in rows)]


def _duration(seconds: float) -> str:
    """Rounded, since an estimate is no measurement: seconds up to two minutes, then minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _scaled(count: int, unit: str) -> str:
    if unit != "B":
        return f"{count:,}{unit}"
    from paceline.kv.layout import format_bytes

    return format_bytes(count)
