"""The record of a run: what was measured, on which machine, with what, by which commit."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.machine import processor_name
from paceline.measure.roofline import Peaks, Work


@dataclass(frozen=True)
class Measurement:
    """One figure from several runs, with the limit that the machine sets.

    ``metric`` carries its unit: ``decode_tokens_per_s``. ``achieved_tokens_per_s`` is the median as a rate where the
    metric is another.
    """

    metric: str
    runs: tuple[float, ...]
    path: Mapping[str, str | int]
    work: Work
    peaks: Peaks
    achieved_tokens_per_s: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.runs, "a measurement needs at least one run"

    @property
    def median(self) -> float:
        """Of the runs."""
        return statistics.median(self.runs)

    def document(self) -> dict[str, Any]:
        """As plain data for JSON."""
        limit = self.peaks.tokens_per_s(self.work)
        achieved = self.median if self.achieved_tokens_per_s is None else self.achieved_tokens_per_s
        return {
            "metric": self.metric,
            "median": self.median,
            "min": min(self.runs),
            "max": max(self.runs),
            "runs": list(self.runs),
            "path": dict(self.path),
            "limit": {
                "bytes_per_token": self.work.bytes_per_token,
                "bandwidth_gb_s": self.peaks.bandwidth_gb_s,
                "int8_gops": self.peaks.int8_gops,
                "limit_tokens_per_s": limit,
                "fraction": achieved / limit,
            },
            **self.details,
        }


def environment() -> dict[str, Any]:
    """The machine and the program: processor, system, versions, the commit where it is known."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": processor_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "paceline": __version__,
        "commit": _commit(Path(__file__).resolve().parent),
    }


def write_record(path: Path, model: str, document: Mapping[str, Any]) -> None:
    """Appends one line of JSON to ``path``: model, environment and the figures."""
    record = {"model": model, "environment": environment(), **document}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def _commit(directory: Path) -> str | None:
    """The commit of the source tree around ``directory``, marked when files differ from it; None outside Paceline's own
    tree."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        if not (top / "src/paceline/measure/record.py").is_file():
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
