"""What the prefix cache on disk gains: the time to the first token of a long prompt after a restart, and without."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import PAGE_TOKENS
from paceline.errors import ParameterError
from paceline.measure.prompts import prompt_tokens
from paceline.measure.record import Measurement
from paceline.measure.roofline import PeaksProbe, Traffic, measure_peaks, prefill_work
from paceline.measure.runs import Report, checked, exactly, path_peaks, quiet

if TYPE_CHECKING:
    from paceline.llm import LLM


def measure_reload(
    open_in: Callable[[Path], LLM],
    traffic: Traffic,
    *,
    num_prompt: int = 2048,
    num_runs: int = 3,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """How many times sooner the first token after a prompt of ``num_prompt`` tokens comes when an engine that was
    closed before has left the prompt's pages on disk than when nothing is known of it.

    ``open_in`` loads the model with its cache in a directory. Each run has a directory of its own, and two engines, one
    after the other, of which the prompt is the first request, as after a restart. Loading the model is not counted.
    """
    if num_prompt < PAGE_TOKENS:
        raise ParameterError("prompt_tokens", num_prompt, f"at least {PAGE_TOKENS}: whole pages are kept on disk")
    # Whole pages are kept, and the last token is computed whatever is known.
    num_cached = min(num_prompt - 1, num_prompt // PAGE_TOKENS * PAGE_TOKENS)
    prefill_s: list[float] = []
    reload_s: list[float] = []
    for index in range(num_runs):
        with tempfile.TemporaryDirectory(prefix="paceline-reload-") as name:
            directory = Path(name)
            with open_in(directory) as llm:
                prompt = prompt_tokens(llm.tokenizer, num_prompt)
                cold = checked(llm.generate(prompt, exactly(1)), 1)
                assert cold.num_cached_tokens == 0, "a new directory is not empty"
            has_left_memory = _leave_memory(directory)
            with open_in(directory) as llm:
                again = checked(llm.generate(prompt, exactly(1)), 1)
                chunk, path, peaks = llm.config.token_budget, llm.path(), path_peaks(llm, probe)
        assert again.num_cached_tokens == num_cached, f"{again.num_cached_tokens} tokens found, not {num_cached}"
        assert again.token_ids == cold.token_ids, "the cache on disk has changed an answer"
        prefill_s.append(cold.timing.ttft_s)
        reload_s.append(again.timing.ttft_s)
        report(index + 1, num_runs)
    speedups = tuple(before / after for before, after in zip(prefill_s, reload_s, strict=True))
    num_computed = num_prompt - num_cached
    return Measurement(
        metric="reload_speedup",
        runs=speedups,
        path=path,
        work=prefill_work(traffic, num_tokens=num_computed, chunk=chunk, num_cached=num_cached),
        peaks=peaks,
        achieved_tokens_per_s=num_computed / statistics.median(reload_s),
        details={
            "reload_s": statistics.median(reload_s),
            "prefill_s": statistics.median(prefill_s),
            "speedup": statistics.median(speedups),
            "reload_runs_s": reload_s,
            "prefill_runs_s": prefill_s,
            "prompt_tokens": num_prompt,
            "cached_tokens": num_cached,
            "left_memory": has_left_memory,
        },
    )


def _leave_memory(directory: Path) -> bool:
    """Asks the system to forget what it holds of the files in memory, as it has after a while; False where it cannot be
    asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # only what is written can be forgotten
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
