"""How long an answer pauses while a long prompt is read beside it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline.errors import ParameterError
from paceline.measure.prompts import prompt_tokens
from paceline.measure.record import Measurement
from paceline.measure.roofline import PeaksProbe, Traffic, measure_peaks, prefill_work
from paceline.measure.runs import Report, checked, cold_domain, exactly, path_peaks, percentiles, quiet
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.outputs import Completion
    from paceline.llm import LLM

NUM_SHORT = 64
"""Tokens of the prompt whose answer is watched."""

NUM_ALONE = 32
"""Tokens of the answer before the long prompt comes: what a gap is when nobody else is there."""


@dataclass(frozen=True)
class Gaps:
    """Seconds between the tokens of an answer: alone, and while a prompt was read in ``prefill_s``."""

    alone_s: list[float]
    during_s: list[float]
    prefill_s: float

    @classmethod
    def of(cls, times_s: Sequence[float], *, submitted_s: float, prefill_s: float) -> Gaps:
        """From the times of the tokens: a gap counts as alone if it ended before the prompt was submitted, and as
        beside it if it began before the prompt was read."""
        gaps, end_s = list(pairwise(times_s)), submitted_s + prefill_s
        return cls(
            alone_s=[after - before for before, after in gaps if after <= submitted_s],
            during_s=[after - before for before, after in gaps if before < end_s and after > submitted_s],
            prefill_s=prefill_s,
        )


def measure_gap(
    open_bounded: Callable[[float | None], LLM],
    traffic: Traffic,
    *,
    max_gap_ms: float,
    num_prompt: int = 8000,
    num_runs: int = 1,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """The 99th percentile of the time between two tokens of an answer while a prompt of ``num_prompt`` tokens is read,
    with the bound ``max_gap_ms``; and the same without a bound.

    ``open_bounded`` loads the model with such a bound. Each run has an engine of its own, one that has measured nothing
    yet, as a server is when its first long prompt comes.
    """
    bounded: list[Gaps] = []
    unbounded: list[Gaps] = []
    for index in range(num_runs):
        with open_bounded(max_gap_ms) as llm:
            bounded.append(watch(llm, num_prompt))
            path, peaks = llm.path(), path_peaks(llm, probe)
        report(2 * index + 1, 2 * num_runs)
        with open_bounded(None) as llm:
            unbounded.append(watch(llm, num_prompt))
        report(2 * index + 2, 2 * num_runs)
    figures = _figures(bounded, num_prompt)
    return Measurement(
        metric="gap_p99_ms",
        runs=tuple(1e3 * percentiles(run.during_s)["p99"] for run in bounded),
        path=path,
        work=prefill_work(traffic, num_tokens=num_prompt, chunk=math.ceil(figures["chunk_tokens"])),
        peaks=peaks,
        achieved_tokens_per_s=num_prompt / figures["prefill_s"],
        details={
            "max_gap_ms": max_gap_ms,
            "prompt_tokens": num_prompt,
            **figures,
            "unbounded": _figures(unbounded, num_prompt),
        },
    )


def watch(llm: LLM, num_prompt: int) -> Gaps:
    """The gaps of a streamed answer before and while a prompt of ``num_prompt`` tokens is read, as a reader sees them:
    a token without text of its own comes with the next one."""
    context_length = llm.config.context_length
    assert context_length is not None
    if num_prompt >= context_length:
        raise ParameterError("prompt_tokens", num_prompt, f"below the context's {context_length} tokens")
    short, long = (prompt_tokens(llm.tokenizer, count) for count in (NUM_SHORT, num_prompt))
    times_s: list[float] = []
    prefill: Future[Completion] | None = None
    submitted_s = 0.0
    answer = llm.stream(short, SamplingParams(ignore_eos=True), cache_domain=cold_domain())
    with ThreadPoolExecutor(1) as beside, answer:
        for _ in answer:
            times_s.append(time.perf_counter())
            if len(times_s) == NUM_ALONE:
                submitted_s = time.perf_counter()
                prefill = beside.submit(lambda: llm.generate(long, exactly(1), cache_domain=cold_domain()))
            elif prefill is not None and prefill.done():
                break
        else:
            raise AssertionError("the answer ended before the prompt was read")
    assert prefill is not None
    timing = checked(prefill.result(), 1).timing
    return Gaps.of(times_s, submitted_s=submitted_s, prefill_s=timing.ttft_s)


def _figures(runs: list[Gaps], num_prompt: int) -> dict[str, Any]:
    """Gaps of all runs together; the prompt's time and the mean rows of a chunk."""
    during_ms = [1e3 * gap_s for run in runs for gap_s in run.during_s]
    return {
        "gap_ms": {**percentiles(during_ms), "max": max(during_ms)},
        "alone_gap_ms": statistics.median(1e3 * gap_s for run in runs for gap_s in run.alone_s),
        "prefill_s": statistics.median(run.prefill_s for run in runs),
        "chunk_tokens": num_prompt * len(runs) / len(during_ms),
    }
