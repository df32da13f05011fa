"""Step costs that were measured before: a small JSON file beside the models that were pulled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.machine import processor_name
from paceline.speculate.cost import StepCost
from paceline.weights.catalog import cache_directory

FORMAT = "paceline step costs 1"
MAX_ENTRIES = 64
"""Kept in the file; the oldest go."""


def memory_path() -> Path:
    """The file, in the directory that PACELINE_HOME names."""
    return cache_directory() / "step_costs.json"


def cost_key(identity: str, path: Mapping[str, str | int], *, processor: str | None = None) -> str:
    """What a step's cost depends on, as a digest: which model (the caller's ``identity``), what runs
    (``Executor.path``), on which processor, in which release."""
    parts = [identity, sorted(path.items()), processor_name() if processor is None else processor, __version__]
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def load_step_cost(key: str, file: Path | None = None) -> StepCost | None:
    """What was saved under ``key``; None where nothing was, or nothing that ``save_step_cost`` writes."""
    entry = _read(file or memory_path()).get(key)
    try:
        assert isinstance(entry, dict)
        return StepCost({int(n): float(seconds) for n, seconds in entry.items()})
    except (AssertionError, ValueError, TypeError):
        return None


def save_step_cost(key: str, cost: StepCost, file: Path | None = None) -> bool:
    """Keeps what was measured (not what was learnt since: that is this process's load) and replaces the file at once.

    Of two processes that do so the later one's stays. Returns False where the file cannot be written: the next engine
    measures again then, which is all that is lost.
    """
    file = file or memory_path()
    entries = _read(file)
    entries.pop(key, None)
    entries[key] = {str(n): seconds for n, seconds in cost.measured.items()}
    kept = dict(list(entries.items())[-MAX_ENTRIES:])
    scratch = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as stream:
            scratch = stream.name
            json.dump({"format": FORMAT, "costs": kept}, stream, indent=1)
        os.replace(scratch, file)
    except OSError:
        if scratch:
            Path(scratch).unlink(missing_ok=True)
        return False
    return True


def _read(file: Path) -> dict[str, Any]:
    """The file's entries; none when it is missing, damaged or not ours."""
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return {}
    costs = document.get("costs")
    return costs if isinstance(costs, dict) else {}
