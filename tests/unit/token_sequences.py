"""Sequences of known tokens as steps of an executor: what the engine's planner does, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS, EngineConfig, ModelConfig
from paceline.executors.base import Executor, StepPlan
from paceline.kv.layout import KVLayout
from paceline.sampling.rows import greedy_rows

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class TokenSequence:
    """Tokens and the pages that keep their keys and values."""

    tokens: Ids
    pages: Ids

    def part(self, begin: int, end: int) -> Part:
        """Its tokens begin : end, as rows of a step."""
        assert 0 <= begin < end <= len(self.tokens)
        return Part(self, begin, end)


@dataclass(frozen=True)
class Part:
    """Tokens begin : end of a sequence."""

    sequence: TokenSequence
    begin: int
    end: int


def random_sequences(lengths: Sequence[int], vocab_size: int, *, seed: int = 0) -> list[TokenSequence]:
    """Random tokens on pages that follow each other; the k-th is the same whatever the later lengths are."""
    sequences, page = [], 0
    for index, length in enumerate(lengths):
        rng = np.random.default_rng((seed, index))
        count = -(-length // PAGE_TOKENS)
        tokens = rng.integers(0, vocab_size, length, dtype=np.int32)
        sequences.append(TokenSequence(tokens, np.arange(page, page + count, dtype=np.int32)))
        page += count
    return sequences


def step_plan(parts: Sequence[Part], *, outputs: Sequence[int] | None = None) -> StepPlan:
    """A step of these parts, greedy; ``outputs`` are the rows whose logits are wanted, all by default."""
    lengths = [part.end - part.begin for part in parts]
    page_table = np.zeros((len(parts), max(len(part.sequence.pages) for part in parts)), np.int32)
    for row, part in zip(page_table, parts, strict=True):
        row[: len(part.sequence.pages)] = part.sequence.pages
    logit_rows = np.arange(sum(lengths), dtype=np.int32) if outputs is None else np.array(outputs, np.int32)
    return StepPlan(
        tokens=np.concatenate([part.sequence.tokens[part.begin : part.end] for part in parts]),
        positions=np.concatenate([np.arange(part.begin, part.end, dtype=np.int32) for part in parts]),
        row_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        page_table=page_table,
        logit_rows=logit_rows,
        samples=greedy_rows(len(logit_rows)),
    )


def run_step(executor: Executor, parts: Sequence[Part]) -> tuple[list[NDArray[np.float32]], list[Ids]]:
    """Logits [rows, vocab] and greedy tokens [rows] of each part."""
    result = executor.run(step_plan(parts))
    cuts = np.cumsum([part.end - part.begin for part in parts])[:-1]
    return np.split(executor.logits().copy(), cuts), np.split(result.sampled.tokens, cuts)


def run_chunks(executor: Executor, sequence: TokenSequence, chunk: int) -> NDArray[np.float32]:
    """Logits [tokens, vocab] of one sequence alone, ``chunk`` tokens a step."""
    count = len(sequence.tokens)
    steps = [sequence.part(begin, min(begin + chunk, count)) for begin in range(0, count, chunk)]
    return np.concatenate([run_step(executor, [step])[0][0] for step in steps])


def engine_config(model: ModelConfig, *, num_pages: int, rows: int = 512, **changes: object) -> EngineConfig:
    """Room for so many pages and rows, each of which may be an output."""
    config = replace(EngineConfig(max_batch=rows, token_budget=rows), **changes)  # type: ignore[arg-type]
    return replace(config, kv_memory_bytes=num_pages * KVLayout.of(model, config.kv_dtype).page_bytes)
