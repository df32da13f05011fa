"""How fast the compared models are, in turns, so that a machine that slows down slows all of them.

The executors are driven directly: what is timed is the passes, without scheduling, and nothing but them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ParameterError
from paceline.executors.rows_plan import rows_plan
from paceline.measure.quality.subject import STEP_ROWS, Subject
from paceline.measure.runs import Report, quiet

NUM_PROMPT = 2 * STEP_ROWS
NUM_NEW = 64
NUM_ROUNDS = 9


@dataclass(frozen=True)
class Speed:
    """Tokens a second of each round, one stream: ``prefill`` of a prompt in steps of 128 rows, ``decode`` after it."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]

    def document(self) -> dict[str, float | list[float]]:
        """Medians, and what they are the medians of."""
        return {
            "prefill_tokens_per_s": statistics.median(self.prefill),
            "decode_tokens_per_s": statistics.median(self.decode),
            "prefill_rounds": list(self.prefill),
            "decode_rounds": list(self.decode),
        }


def check_room(context: int) -> None:
    """Raises ``ParameterError`` where a window of so many tokens has no room for prompt and answer."""
    needed = NUM_PROMPT + NUM_NEW
    if context < needed:
        raise ParameterError("context", context, f"at least {needed} to measure speed")


def measure_speed(
    subjects: Sequence[Subject], tokens: Sequence[int], *, num_rounds: int = NUM_ROUNDS, report: Report = quiet
) -> list[Speed]:
    """The speed of each subject over the first ``NUM_PROMPT`` of ``tokens``, after a round that is thrown away.

    Raises ``ParameterError`` as ``check_room`` does.
    """
    check_room(min(subject.context_length for subject in subjects))
    prompt = [tokens[at % len(tokens)] for at in range(NUM_PROMPT)]
    rates = [_round(subjects, prompt, at, num_rounds + 1, report) for at in range(num_rounds + 1)][1:]
    return [Speed(*map(tuple, zip(*(one[at] for one in rates), strict=True))) for at in range(len(subjects))]


def _round(
    subjects: Sequence[Subject], prompt: Sequence[int], number: int, total: int, report: Report
) -> list[tuple[float, float]]:
    """Each subject's rates of prefill and decode, once. Who begins changes from round to round."""
    rates: dict[int, tuple[float, float]] = {}
    for turn in range(len(subjects)):
        at = (turn + number) % len(subjects)
        rates[at] = _rates(subjects[at], prompt)
    report(number + 1, total)
    return [rates[at] for at in range(len(subjects))]


def _rates(subject: Subject, prompt: Sequence[int]) -> tuple[float, float]:
    run = subject.executor.run
    started_s = time.perf_counter()
    for start in range(0, len(prompt), STEP_ROWS):
        step = prompt[start : start + STEP_ROWS]
        is_last = start + STEP_ROWS >= len(prompt)
        result = run(rows_plan(step, start, num_outputs=int(is_last)))
    read_s = time.perf_counter()
    for position in range(len(prompt), len(prompt) + NUM_NEW):
        result = run(rows_plan([int(result.sampled.tokens[0])], position, num_outputs=1))
    ended_s = time.perf_counter()
    return len(prompt) / (read_s - started_s), NUM_NEW / (ended_s - read_s)
