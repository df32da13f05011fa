"""Runs the requests of one cell through an engine of its own, and says whether the cell's path was really taken."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from paceline.config import PAGE_TOKENS, SPLIT_TOKENS, EngineConfig, ModelConfig
from paceline.engine.outputs import Completion, TokenLogprob
from paceline.engine.prompts import PromptTokenizer
from paceline.executors.base import Executor
from paceline.llm import LLM
from paceline.measure.cells import SHARED_TOKENS, Cell, Question, number_of_requests
from paceline.measure.losslessness import Answer, Position
from paceline.measure.planted_drafts import PlantedDrafter
from paceline.measure.trace import Trace, TracingExecutor
from paceline.speculate.counts import SpeculationCounts
from paceline.speculate.draft import MAX_NODES
from paceline.speculate.policy import FixedPolicy
from paceline.speculate.speculator import Speculator

_WARM_SEEDS = 2**40
"""Added to a question's seed where it only fills the cache."""
_UNIT_ROWS = 32
"""Pairs of a token and a head that attention gives one unit of work: ``kQueryRows`` of the native module."""
_STALE_BYTE = 0x3C
"""Fills a cell's pages when it is over: the next cell gets the same ones, where the right keys and values would hide
that it writes none. A small number in every KV format, for a NaN would do harm even where a window masks it."""


_SPECULATE = {"": "off", "self": "draft:self:int4", **{name: name for name in ("suffix", "ngram", "forced")}}
_DRAFT_TOKENS = 5


class Load(Protocol):
    """Loads the model under a configuration; the engine gets what ``wrap`` makes of the executor."""

    def __call__(self, config: EngineConfig, wrap: Callable[[Executor], Executor]) -> LLM: ...


@dataclass(frozen=True)
class Run:
    """What came of a cell's requests: answers by question and choice, and what its path left behind. Holds no
    executor, whose weights must be able to go."""

    answers: dict[tuple[str, int], Answer]
    completions: dict[str, Completion]
    trace: Trace
    path: dict[str, str | int]
    model: ModelConfig
    preemptions: int
    speculation: SpeculationCounts
    elapsed_s: float


class Workbench:
    """Opens engines over one model, one at a time. Weights are loaded again only where threads, instruction set or KV
    format change; each cell gets an engine, pages and a cache of its own over them."""

    def __init__(self, load: Load, config: EngineConfig, *, max_chunk: int, max_batch: int) -> None:
        self._load = load
        self._max_chunk = max_chunk
        # What a cell needs is set for each; nothing may depend on how fast this machine is.
        self._config = dataclasses.replace(
            config,
            max_batch=max_batch,
            token_budget=max_chunk + max_batch - 1,
            prefix_cache=False,
            max_gap_ms=None,
            speculate="off",
        )
        self._key: tuple[object, ...] | None = None
        self._executor: Executor | None = None
        self._tokenizer: PromptTokenizer | None = None

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The model's."""
        if self._tokenizer is None:
            self._open(Cell())
        assert self._tokenizer is not None
        return self._tokenizer

    def path(self, cell: Cell) -> dict[str, str | int]:
        """The path that really runs."""
        return self._open(cell).path()

    def context_length(self) -> int:
        """Tokens that a request may reach."""
        model = self._open(Cell()).model
        return min(model.context_length, self._config.context_length or model.context_length)

    def close(self) -> None:
        """Lets the weights go."""
        self._key = self._executor = None

    def run(
        self,
        cell: Cell,
        questions: Sequence[Question],
        *,
        known: Mapping[int, Sequence[int]] | None = None,
        keep_logits: bool = False,
    ) -> Run:
        """The answers on the cell's path, after what its cache must hold. ``known``: seed -> prompt and answer, where
        drafts are made from them."""
        started_s = time.perf_counter()
        if cell.drafts == "self":
            self.close()  # as below
            with self._loaded_engine(self._config_of(cell, questions)) as (llm, tracing):
                if cell.cache == "hit":
                    _ask(llm, [_same_prompt(question) for question in questions])
                return _run(llm, tracing, questions, started_s, keep_logits=keep_logits)
        if cell.cache == "disk":
            self.close()  # two copies of the weights may not fit
            with tempfile.TemporaryDirectory(prefix="paceline-verify-") as directory:
                self._fill(cell, questions, directory)
                with self._engine_over_directory(cell, questions, directory) as (llm, tracing):
                    return _run(llm, tracing, questions, started_s, keep_logits=keep_logits)
        with self._engine(cell, questions, known or {}) as (llm, tracing):
            if cell.cache == "hit" or cell.drafts in ("suffix", "ngram"):
                _ask(llm, [_same_prompt(question) for question in questions])
            elif cell.cache == "partial":
                vocab_size = tracing.model.vocab_size
                _ask(llm, [_same_beginning(question, vocab_size) for question in questions])
            return _run(llm, tracing, questions, started_s, keep_logits=keep_logits)

    def _fill(self, cell: Cell, questions: Sequence[Question], directory: str) -> None:
        """Leaves a cache that knows the questions on disk, and nothing in memory."""
        with self._engine_over_directory(cell, questions, directory) as (llm, _):
            _ask(llm, [_same_prompt(question) for question in questions])

    @contextmanager
    def _engine(
        self, cell: Cell, questions: Sequence[Question], known: Mapping[int, Sequence[int]]
    ) -> Iterator[tuple[LLM, TracingExecutor]]:
        tracing = TracingExecutor(self._open(cell), num_pages=cell.pool_pages)
        config, speculator = self._config_of(cell, questions), None
        if cell.drafts in ("chain", "tree"):
            vocab_size = tracing.model.vocab_size
            drafter = PlantedDrafter(known, vocab_size, trees=cell.drafts == "tree")
            speculator = Speculator([drafter], FixedPolicy(MAX_NODES), vocab_size=vocab_size)
        try:
            with LLM.from_parts(tracing, self.tokenizer, config=config, speculator=speculator) as llm:
                yield llm, tracing
        finally:
            tracing.pages[sorted(tracing.written_pages)] = _STALE_BYTE

    @contextmanager
    def _engine_over_directory(
        self, cell: Cell, questions: Sequence[Question], directory: str
    ) -> Iterator[tuple[LLM, TracingExecutor]]:
        config = dataclasses.replace(self._config_of(cell, questions), kv_dir=directory)
        with self._loaded_engine(config) as engine:
            yield engine

    @contextmanager
    def _loaded_engine(self, config: EngineConfig) -> Iterator[tuple[LLM, TracingExecutor]]:
        traces: list[TracingExecutor] = []

        def wrap(executor: Executor) -> Executor:
            traces.append(TracingExecutor(executor))
            return traces[0]

        with self._load(config, wrap) as llm:
            yield llm, traces[0]

    def _open(self, cell: Cell) -> Executor:
        """The executor of a cell."""
        key = (cell.num_threads, cell.isa, cell.kv_dtype)
        if self._key != key or self._executor is None:
            self.close()
            opened: list[Executor] = []

            def keep(executor: Executor) -> Executor:
                opened.append(executor)
                return executor

            with self._load(self._loaded_config(cell), keep) as llm:
                self._tokenizer = llm.tokenizer
            self._key, self._executor = key, opened[0]
        return self._executor

    def _loaded_config(self, cell: Cell) -> EngineConfig:
        return dataclasses.replace(
            self._config,
            num_threads=cell.num_threads,
            isa=cell.isa or self._config.isa,
            kv_dtype=cell.kv_dtype or self._config.kv_dtype,
        )

    def _config_of(self, cell: Cell, questions: Sequence[Question]) -> EngineConfig:
        batch = min(cell.batch, number_of_requests(questions))
        return dataclasses.replace(
            self._loaded_config(cell),
            max_batch=batch,
            # All but one request may decode while the one reads a chunk.
            token_budget=(cell.chunk or self._max_chunk) + batch - 1,
            prefix_cache=cell.cache != "off",
            speculate=_SPECULATE.get(cell.drafts or ""),
            draft_tokens=None if cell.drafts is None else _DRAFT_TOKENS,
        )


def path_problem(cell: Cell, run: Run, questions: Sequence[Question], plain_path: dict[str, str | int]) -> str | None:
    """Why the run did not take the path that its cell names; None when it did."""
    path = run.path
    wanted = {
        "threads": cell.num_threads,
        "isa": cell.isa or plain_path["isa"],
        "kv_dtype": cell.kv_dtype or plain_path["kv_dtype"],
    }
    for name, value in wanted.items():
        if path[name] != value:
            return f"{name} is {path[name]}, not {value}"
    batch = max(step.num_requests for step in run.trace.steps)
    if cell.pool_pages is not None:
        return None if run.preemptions else "no request was preempted"
    if batch != min(cell.batch, number_of_requests(questions)):
        return f"at most {batch} requests ran together"
    problem = _chunk_problem(cell, run, questions) or _cache_problem(cell, run, questions)
    return problem or (None if cell.drafts is None else _drafts_problem(cell, run))


def _drafts_problem(cell: Cell, run: Run) -> str | None:
    counts = run.speculation
    if counts.proposed == 0:
        return "nothing was drafted"
    if cell.drafts in ("ngram", "forced"):  # what they find may all be wrong, or be spelled otherwise
        return None
    refused = cell.drafts not in ("chain", "tree") or counts.accepted < counts.proposed
    if not (counts.accepted > 0 and refused):
        return f"{counts.accepted} of {counts.proposed} drafted tokens were accepted"
    return None


def _chunk_problem(cell: Cell, run: Run, questions: Sequence[Question]) -> str | None:
    if cell.chunk is None:
        return None
    largest = max(step.max_rows for step in run.trace.steps)
    left = max(len(question.prompt) - run.completions[question.name].num_cached_tokens for question in questions)
    # Alone, a prompt is cut into chunks of just that size; in a batch, rows that no other request needs may be added.
    if not min(cell.chunk, left) <= largest <= cell.chunk + cell.batch - 1:
        return f"the largest chunk had {largest} rows"
    return None


def _cache_problem(cell: Cell, run: Run, questions: Sequence[Question]) -> str | None:
    if cell.cache == "shared":
        # The first reads the beginning; all others find at least its whole pages.
        _, *others = sorted(run.completions[question.name].num_cached_tokens for question in questions)
        wanted = SHARED_TOKENS // PAGE_TOKENS * PAGE_TOKENS
        if min(others) < wanted:
            return f"a request shared {min(others)} tokens, not {wanted}"
        splits = [step.shared_splits for step in run.trace.steps if step.shared_splits is not None]
        read_apart = _shares_what_it_reads(run.model) and splits and not any(splits)
        return "each request read the shared keys by itself" if read_apart else None
    for question in questions:
        cached = run.completions[question.name].num_cached_tokens
        low, high = _cached_range(cell, question, questions)
        if not low <= cached <= high:
            return f"{question.name!r} found {cached} tokens in the cache, not {low} to {high}"
        first = run.trace.outputs[question.seed(0), len(question.prompt)][0]
        whole = cell.chunk is None and cell.batch == 1 and question.params.prompt_logprobs is None
        if whole and first.first_position != cached:
            return f"{question.name!r} found {cached} tokens in the cache and computed from {first.first_position} on"
    return None


def _shares_what_it_reads(model: ModelConfig) -> bool:
    """Whether attention is to read the shared split once: not where one row's heads fill most of a unit by themselves,
    nor where a window hides a part of the split."""
    few_heads = 2 * model.num_heads <= _UNIT_ROWS * model.num_kv_heads
    return few_heads and (model.kv_window or 2 * SPLIT_TOKENS) >= 2 * SPLIT_TOKENS


def _cached_range(cell: Cell, question: Question, questions: Sequence[Question]) -> tuple[int, int]:
    """Fewest and most tokens that a question finds in the cell's cache: all but the last, whose logits are wanted. In a
    cold one it can find only what another question of the run has left there."""
    most = len(question.prompt) - 1
    if question.params.prompt_logprobs is not None or cell.cache == "off":
        return 0, 0
    if cell.cache == "cold":
        others = (other.prompt for other in questions if other is not question)
        return 0, min(most, max((_num_shared(question.prompt, other) for other in others), default=0))
    if cell.cache == "partial":
        return (_num_alike(question),) * 2
    if cell.cache == "disk":  # keeps whole pages
        return most // PAGE_TOKENS * PAGE_TOKENS, most
    return most, most


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _num_alike(question: Question) -> int:
    """Tokens that the partly equal prompt shares: two thirds, ending inside a page."""
    count = max(1, 2 * len(question.prompt) // 3)
    return count - 1 if count % PAGE_TOKENS == 0 else count


def _same_prompt(question: Question) -> Question:
    seed = (question.params.seed or 0) + _WARM_SEEDS
    return dataclasses.replace(question, params=dataclasses.replace(question.params, seed=seed))


def _same_beginning(question: Question, vocab_size: int) -> Question:
    """A prompt that parts from the question's inside a page, and fills that page."""
    alike = question.prompt[: _num_alike(question)]
    other = (question.prompt[len(alike)] + 1) % vocab_size
    params = dataclasses.replace(_same_prompt(question).params, max_tokens=1, min_tokens=0)
    return Question(question.name, alike + (other,) * PAGE_TOKENS, params)


def _ask(llm: LLM, questions: Sequence[Question]) -> list[Completion]:
    completions = llm.generate(
        [list(question.prompt) for question in questions], [question.params for question in questions]
    )
    for completion in completions:
        for choice in completion.choices or (completion,):
            if choice.error is not None:
                raise choice.error
    return completions


def _run(
    llm: LLM, tracing: TracingExecutor, questions: Sequence[Question], started_s: float, *, keep_logits: bool
) -> Run:
    trace = tracing.watch(keep_logits=keep_logits)
    completions = _ask(llm, questions)
    drafted = [choice.speculation for done in completions for choice in done.choices or (done,) if choice.speculation]
    answers = {
        (question.name, index): _answer(question, index, choice, trace)
        for question, completion in zip(questions, completions, strict=True)
        for index, choice in enumerate(completion.choices or (completion,))
    }
    named = {question.name: completion for question, completion in zip(questions, completions, strict=True)}
    path, elapsed_s = tracing.path(), time.perf_counter() - started_s
    counts = SpeculationCounts(
        proposed=sum(one.proposed for one in drafted), accepted=sum(one.accepted for one in drafted)
    )
    return Run(answers, named, trace, path, tracing.model, llm.stats().preemptions, counts, elapsed_s)


def _answer(question: Question, choice: int, completion: Completion, trace: Trace) -> Answer:
    num_prompt = len(question.prompt)
    read = completion.prompt_logprobs or []
    drawn: Sequence[TokenLogprob | None] = completion.logprobs or [None] * len(completion.token_ids)
    known = [(index, question.prompt[index], read[index]) for index in range(1, len(read))]
    known += [
        (num_prompt + at, token, logprob)
        for at, (token, logprob) in enumerate(zip(completion.token_ids, drawn, strict=True))
    ]
    seed = question.seed(choice)
    tokens = [*question.prompt, *completion.token_ids]
    positions = []
    for index, token, logprob in known:
        output = trace.output(seed, tokens, index)
        positions.append(
            Position(
                index,
                token,
                None if logprob is None else logprob.logprob,
                None if output is None else output.top,
                () if logprob is None else tuple((top.token_id, top.logprob) for top in logprob.top),
            )
        )
    return Answer(tuple(positions), (completion.finish_reason, completion.text))
