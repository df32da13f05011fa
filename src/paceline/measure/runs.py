"""What benchmarks of an engine share: answers of an exact length, cold caches, runs after a warm-up, percentiles."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from paceline.measure.roofline import Peaks, PeaksProbe
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.outputs import Completion
    from paceline.llm import LLM

Result = TypeVar("Result")

Report = Callable[[int, int], None]
"""Called with (runs done, runs in all)."""


def quiet(done: int, total: int) -> None:
    """Reports nothing."""


def exactly(num_new: int) -> SamplingParams:
    """Greedy, and ``num_new`` tokens whatever the model would rather say."""
    return SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)


def checked(completion: Completion, num_new: int) -> Completion:
    """The completion, once it is sure that it did all its work."""
    if completion.error is not None:
        raise completion.error
    assert completion.num_completion_tokens == num_new, (
        completion.num_completion_tokens,
        num_new,
        completion.finish_reason,
    )
    return completion


def cold_domain() -> str:
    """A cache domain in which nothing was ever computed: not in this process, nor, with a cache on disk, in one before
    it. What runs in it starts with a cold cache."""
    return f"benchmark {secrets.token_hex(16)}"


def repeat(one: Callable[[], Result], num_runs: int, report: Report) -> list[Result]:
    """``num_runs`` results after one that warms caches and is thrown away."""
    results = []
    for index in range(num_runs + 1):
        results.append(one())
        report(index + 1, num_runs + 1)
    return results[1:]


def path_peaks(llm: LLM, probe: PeaksProbe) -> Peaks:
    """What the machine reaches now with the instruction set and the threads of an engine."""
    path = llm.path()
    return probe(str(path["isa"]), int(path["threads"]))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": statistics.median(ordered), "p95": at(0.95), "p99": at(0.99)}
