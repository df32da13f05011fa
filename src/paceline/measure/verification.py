"""Proves on one model and machine that every path gives the bits of the plain one: runs each cell and judges it.

The plain path: one request at a time, each prompt whole, no cache, one thread. A cell is EQUAL when all its requests
have the plain path's bits, else FAIL. Instruction sets give the same bits by design and are held to that. Another KV
format rounds differently: against f16 it may be a TIE, within the bounds of ``losslessness``, while it has to be EQUAL
to itself on another path. A cell whose path was not really taken is a FAIL as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from paceline.config import PAGE_TOKENS, EngineConfig, KVFormat
from paceline.errors import ParameterError
from paceline.measure.cells import (
    NUM_DISTINCT,
    SHARED_TOKENS,
    Cell,
    Host,
    Question,
    cells,
    format_question,
    number_of_requests,
    plain_questions,
    sampling_base,
    sampling_questions,
)
from paceline.measure.losslessness import (
    Answer,
    Difference,
    Logits,
    Rounding,
    Verdict,
    compare_formats,
    first_difference,
)
from paceline.measure.runs import Report, quiet
from paceline.measure.workbench import Load, Run, Workbench, path_problem

Choice = tuple[str, int]
"""A question's name and the number of one of its answers."""

ORDER = ("threads", "batch", "chunk", "cache", "drafts", "memory", "sampling", "isa", "kv", "crossed")
"""Of dimensions in the results, whatever the order in which they ran."""


@dataclass(frozen=True)
class Effort:
    """How long the requests are: tokens of the long prompt, of the text for formats, and of a short answer."""

    num_long: int
    num_text: int
    num_new: int


QUICK = Effort(num_long=200, num_text=128, num_new=6)
FULL = Effort(num_long=333, num_text=256, num_new=40)
"""Long enough for 32 requests to run together however small the chunks in which they come."""


@dataclass(frozen=True)
class Result:
    """The verdict on one cell. ``problem`` says why its path was not taken or broke; ``num_positions`` were compared,
    in all its requests. ``elapsed_s`` holds loads and what fills the cache; a sampling parameter has its share of what
    all took together."""

    dimension: str
    varied: str
    verdict: Verdict
    num_positions: int
    elapsed_s: float
    difference: Difference | None = None
    rounding: Rounding | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Proof:
    """All results, and the plain path that they were compared with."""

    plain_path: dict[str, str | int]
    results: tuple[Result, ...]
    elapsed_s: float

    @property
    def verdict(self) -> Verdict:
        """FAIL if any cell is one; a TIE of formats is no failure."""
        return "FAIL" if any(result.verdict == "FAIL" for result in self.results) else "EQUAL"


def verify(
    load: Load, config: EngineConfig, host: Host, *, full: bool, effort: Effort | None = None, report: Report = quiet
) -> Proof:
    """Runs the matrix; ``report`` hears of each stage. Raises what the plain path raises, and ``ParameterError`` where
    the context is too small for the requests: there is nothing to compare. What any other path raises is a FAIL of its
    cell."""
    started_s = time.perf_counter()
    matrix = _Matrix(load, config, host, effort or (FULL if full else QUICK))
    stages = _stages(matrix, config.kv_dtype, host, full=full)
    total = len(stages) + 1
    report(1, total)
    results: list[Result] = []
    for done, stage in enumerate(stages, start=2):
        results += stage()
        report(done, total)
    matrix.bench.close()
    results.sort(key=lambda result: (ORDER.index(result.dimension), result.varied if result.dimension == "kv" else ""))
    return Proof(matrix.plain_path, tuple(results), time.perf_counter() - started_s)


def _stages(matrix: _Matrix, kv_dtype: KVFormat, host: Host, *, full: bool) -> list[Callable[[], list[Result]]]:
    """What is to be run, in an order in which weights are seldom loaded: what the open engine can do, then format by
    format, then the rest."""
    listed = cells(host, full=full)
    near = [entry for entry in listed if not entry[1].is_loaded_apart]
    stages: list[Callable[[], list[Result]]] = [partial(matrix.cell, *entry) for entry in near]
    stages.append(matrix.sampling)
    for other in (kv_dtype, *host.kv_formats):
        if other != "f16":
            stages.append(partial(matrix.format, other))
        stages += [partial(matrix.cell, *entry) for entry in listed if entry[1].kv_dtype == other]
    rest = [entry for entry in listed if entry[1].is_loaded_apart and entry[1].kv_dtype is None]
    return stages + [partial(matrix.cell, *entry) for entry in rest]


class _Matrix:
    """What all cells share: the requests and their plain answers, by KV format."""

    def __init__(self, load: Load, config: EngineConfig, host: Host, effort: Effort) -> None:
        self._host = host
        longest = max(effort.num_long, SHARED_TOKENS + PAGE_TOKENS) + 2 * effort.num_new
        self.bench = Workbench(load, config, max_chunk=longest, max_batch=NUM_DISTINCT)
        if self.bench.context_length() < longest:
            raise ParameterError(
                "context_length", self.bench.context_length(), f"at least {longest} for these requests"
            )
        self.plain_path = self.bench.path(Cell())
        encoder = self.bench.tokenizer
        self._questions = plain_questions(encoder, num_long=effort.num_long, num_new=effort.num_new)
        self._text = format_question(encoder, num_prompt=effort.num_text, num_new=4 * effort.num_new)
        self._f16_text: Run | None = None
        self._plain: dict[KVFormat | None, dict[Choice, Answer]] = {
            None: self.bench.run(Cell(), self._questions).answers
        }
        base = sampling_base(encoder, num_new=2 * effort.num_new)
        answer = self.bench.run(Cell(), [base]).completions[base.name]
        self._sampling_questions = sampling_questions(base, answer.token_ids, answer.text, encoder.eos_token_ids)
        self._plain[None].update(self.bench.run(Cell(), self._sampling_questions).answers)

    def cell(self, dimension: str, cell: Cell) -> list[Result]:
        """One cell, its requests against the plain ones in the same KV format."""
        questions = [self._questions[index] for index in cell.request_indexes]
        started_s = time.perf_counter()
        attempt = self._attempt(cell, questions)
        expected = self._plain.setdefault(cell.kv_dtype, {})
        unknown = [question for question in questions if (question.name, 0) not in expected]
        if attempt.run is not None and unknown:
            alone = Cell(num_threads=cell.num_threads, kv_dtype=cell.kv_dtype)
            expected.update(self.bench.run(alone, unknown).answers)
        return [_judged(dimension, cell.varied(), [attempt], questions, expected, time.perf_counter() - started_s)]

    def sampling(self) -> list[Result]:
        """A result a parameter: its request among all the others, few at a time in small chunks, then all at once over
        a warm cache, then few at a time with drafts; one with a structure also with drafts of what that forces."""
        questions = self._sampling_questions
        all_requests = number_of_requests(questions)
        few = Cell(num_threads=self._host.num_threads, batch=4, chunk=16, cache="cold")
        warm = Cell(num_threads=self._host.num_threads, batch=all_requests, cache="hit")
        trees, suffixes = (replace(few, drafts=drafts) for drafts in ("tree", "suffix"))
        started_s = time.perf_counter()
        attempts = [self._attempt(cell, questions) for cell in (few, warm, trees, suffixes)]
        structured = [question for question in questions if question.params.structure is not None]
        forced = [self._attempt(replace(few, drafts="forced"), structured)] if structured else []
        share_s = (time.perf_counter() - started_s) / len(questions)
        return [
            _judged(
                "sampling",
                f"{question.name} · among {all_requests}, cache cold and hit, drafts",
                attempts + (forced if question in structured else []),
                [question],
                self._plain[None],
                share_s,
            )
            for question in questions
        ]

    def format(self, kv_dtype: KVFormat) -> list[Result]:
        """A KV format against f16, over a text whose every position is compared."""
        started_s = time.perf_counter()
        varied = f"{kv_dtype} KV against f16 KV"
        try:
            if self._f16_text is None:
                self._f16_text = self._read_text("f16")
            expected, found = self._f16_text, self._read_text(kv_dtype)
            rounding = compare_formats(
                _logits(expected, self._text),
                _logits(found, self._text),
                num_prompt=len(self._text.prompt) - 1,
                tokens=(
                    expected.completions[self._text.name].token_ids,
                    found.completions[self._text.name].token_ids,
                ),
                model=found.model,
                formats=("f16", kv_dtype),
            )
        except Exception as error:  # whatever it is, it is this path's failure
            return [Result("kv", varied, "FAIL", 0, time.perf_counter() - started_s, problem=_text_of(error))]
        key = (self._text.name, 0)
        difference = first_difference(self._text.name, expected.answers[key], found.answers[key])
        verdict: Verdict = "EQUAL" if difference is None else "TIE" if rounding.is_tie else "FAIL"
        elapsed_s = time.perf_counter() - started_s
        return [
            Result(
                "kv",
                varied,
                verdict,
                rounding.num_positions,
                elapsed_s,
                None if verdict == "TIE" else difference,
                rounding,
            )
        ]

    def _read_text(self, kv_dtype: KVFormat) -> Run:
        # The configuration's own format is not named, so that an engine that is open already serves.
        own = kv_dtype == self.plain_path["kv_dtype"]
        cell = Cell(num_threads=self._host.num_threads, kv_dtype=None if own else kv_dtype)
        run = self.bench.run(cell, [self._text], keep_logits=True)
        problem = path_problem(cell, run, [self._text], self.plain_path)
        if problem is not None:
            raise PathError(problem)
        return run

    def _attempt(self, cell: Cell, questions: Sequence[Question]) -> Attempt:
        try:
            known = _known(questions, self._plain[None]) if cell.drafts is not None else None
            run = self.bench.run(cell, questions, known=known)
            problem = path_problem(cell, run, questions, self.plain_path)
            return Attempt(run, None if problem is None else f"path not taken: {problem}")
        except Exception as error:  # as above
            return Attempt(None, _text_of(error))


def _known(questions: Sequence[Question], answers: Mapping[Choice, Answer]) -> dict[int, list[int]]:
    """Seed -> prompt and answer."""
    known: dict[int, list[int]] = {}
    for question in questions:
        for choice in range(question.params.n):
            positions = answers[question.name, choice].positions
            drawn = [position.token for position in positions if position.index >= len(question.prompt)]
            known[question.seed(choice)] = [*question.prompt, *drawn]
    return known


class PathError(Exception):
    """A run took another path than the one that it was to take."""


@dataclass(frozen=True)
class Attempt:
    """A run, and why it does not count; the run is None where it broke."""

    run: Run | None
    problem: str | None


def _judged(
    dimension: str,
    varied: str,
    attempts: Sequence[Attempt],
    questions: Sequence[Question],
    expected: Mapping[Choice, Answer],
    elapsed_s: float,
) -> Result:
    """Compares what the attempts gave on ``questions``."""
    difference, num_positions = None, 0
    for run in (attempt.run for attempt in attempts if attempt.run is not None):
        for question in questions:
            for choice in range(question.params.n):
                key = (question.name, choice)
                name = question.name if choice == 0 else f"{question.name}, answer {choice + 1}"
                difference = difference or first_difference(name, expected[key], run.answers[key])
                num_positions += len(run.answers[key].positions)
    problem = next((attempt.problem for attempt in attempts if attempt.problem is not None), None)
    verdict: Verdict = "EQUAL" if difference is None and problem is None else "FAIL"
    return Result(dimension, varied, verdict, num_positions, elapsed_s, difference, problem=problem)


def _logits(run: Run, question: Question) -> Logits:
    """Logits [positions - 1, vocab] of a question's one answer, from the second token on."""
    answer = run.answers[question.name, 0]
    rows = [run.trace.outputs[question.seed(0), position.index][-1].logits for position in answer.positions]
    return np.stack([row for row in rows if row is not None])


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
