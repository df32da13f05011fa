"""Opens the model that a command was asked for, showing how far a download is and that a load goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.terminal import Progress, dim
from paceline.config import EngineConfig

if TYPE_CHECKING:
    from paceline.llm import LLM


def fetch_model(name: str) -> Path:
    """The model's file or directory; downloads it where it is not there yet."""
    from paceline.weights.catalog import resolve_model

    with Progress(f"Getting {name}", unit="B") as progress:
        return resolve_model(name, progress=progress.update)


def open_model(name: str, config: EngineConfig, *, verbose: bool = False, **executor: Any) -> tuple[LLM, float]:
    """The loaded model and the seconds that it took, imports included; ``verbose`` prints where the memory goes,
    ``executor`` names another executor and its device, as ``LLM`` takes them."""
    path = fetch_model(name)
    started_s = time.perf_counter()
    with Progress(f"Loading {name}"):
        from paceline.llm import LLM

        llm = LLM(str(path), config=config, **executor)
    if verbose:
        print(dim(llm.memory_table(), sys.stderr), file=sys.stderr)
    return llm, time.perf_counter() - started_s
