"""A request as drafters see it, a draft model over a fake executor, and what the definition says that it proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_executor import FakeExecutor, fake_logits, log_softmax, sample
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS
from paceline.executors.base import StepPlan, StepResult
from paceline.params import SamplingParams
from paceline.sampling.constraint import Constraint
from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import greedy_rows
from paceline.speculate.draft import Draft
from paceline.speculate.draft_model import DraftModelDrafter
from paceline.speculate.draft_pages import OwnPages

Logits = Callable[[Sequence[int]], NDArray[np.float32]]


def sampling_record(*, temperature: float = 0.0, seed: int = 7, repetition_penalty: float = 1.0) -> NDArray[np.void]:
    """One record [1]."""
    record = greedy_rows(1).rows
    record["temperature"], record["seed"], record["repetition_penalty"] = temperature, seed, repetition_penalty
    return record


@dataclass(eq=False)
class SmallRequest:
    """A request. With a repetition penalty all its tokens are counted."""

    tokens: list[int]
    request_id: int = 0
    max_tokens: int = 10_000
    domain: bytes = b""
    record: NDArray[np.void] = field(default_factory=sampling_record, repr=False)
    slot: int | None = None
    constraint: Constraint | None = None
    bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams, repr=False)

    @property
    def num_prompt(self) -> int:
        return 1

    def add_lists(self, lists: ListsBuilder, output: int, path: Sequence[int]) -> None:
        if self.record["repetition_penalty"][0] != 1:
            ids, counts = np.unique(np.array([*self.tokens, *path], np.int32), return_counts=True)
            lists.add_counts(output, ids, counts.astype(np.int32))
        if self.bias:
            lists.add_bias(output, np.array(list(self.bias), np.int32), np.array(list(self.bias.values()), np.float32))
        if self.banned:
            lists.add_banned(output, np.array(self.banned, np.int32))


def draw(request: SmallRequest, path: Sequence[int], logits: NDArray[np.float32], banned: Sequence[int] = ()) -> int:
    """The token that a model with these logits draws after a request's tokens and ``path``."""
    rows = request.record.copy()
    rows["position"] = len(request.tokens) + len(path)
    lists = ListsBuilder(rows)
    request.add_lists(lists, 0, path)
    if banned:
        lists.add_banned(0, np.array([*request.banned, *banned], np.int32))
    return int(sample(lists.build(), logits[None]).tokens[0])


def drafted_alone(
    request: SmallRequest,
    limit: int,
    *,
    vocab_size: int = 97,
    window: int | None = None,
    min_confidence: float = 0.0,
    banned: Sequence[int] = (),
    logits_after: Logits | None = None,
) -> tuple[list[int], list[float]]:
    """Tokens and confidences by the definition: no pages, no steps, no other requests."""
    path: list[int] = []
    confidence: list[float] = []
    limit = min(limit, request.max_tokens - len(request.tokens) - 1)
    while len(path) < limit and np.prod(confidence) >= min_confidence:
        seen = [*request.tokens, *path]
        logits = logits_after(seen) if logits_after else fake_logits(seen[-(window or len(seen)) :], vocab_size)
        path.append(draw(request, path, logits, banned))
        confidence.append(float(np.exp(log_softmax(logits)[path[-1]])))
    return path, confidence


class FlakyExecutor(FakeExecutor):
    """Fails when told to, half way: what it was to write is garbage then."""

    fails = False

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        if self.fails:
            self.fails = False
            self._pages[plan.page_table[0, plan.positions[0] // PAGE_TOKENS]] = -7
            raise RuntimeError("told to")
        return super().run(plan)


def drafter_of(executor: FakeExecutor, *, max_sequences: int = 8, **options: Any) -> tuple[DraftModelDrafter, OwnPages]:
    pages = OwnPages(executor, max_sequences=max_sequences)
    options = {"vocab_size": executor.model.vocab_size, "min_confidence": 0.0} | options
    return DraftModelDrafter(executor, pages, **options), pages


def some_tokens(count: int, *, seed: int = 0, vocab_size: int = 97) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, count)]


def chain_of(draft: Draft | None) -> list[int]:
    assert draft is not None
    assert draft.is_chain
    return list(draft.tokens)
