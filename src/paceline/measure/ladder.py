"""The ladder: the same answer by one technique after the other, each with its rate and whether its tokens are those of
the step before.

A technique is one entry of ``TECHNIQUES``: a name and a function. Adding one needs nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.measure.prompts import distinct_prompts
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM

NO_CACHE_LIMIT_S = 15.0
"""On a slow machine the row without a cache stops here; its rate and its tokens count as far as they go."""

BATCH = 8


@dataclass(frozen=True)
class Climb:
    """One technique's turn: output tokens of all requests, the seconds they took, and the tokens of the common prompt's
    answer."""

    num_tokens: int
    elapsed_s: float
    tokens: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.elapsed_s


@dataclass(frozen=True)
class Technique:
    """A way to compute the answer to ``prompt`` in ``num_new`` tokens."""

    name: str
    climb: Callable[[LLM, Sequence[int], int], Climb]


@dataclass(frozen=True)
class Rung:
    """A row of the ladder. ``equal`` is None for the first row, else whether its tokens are those of the row above."""

    technique: str
    tokens_per_s: float
    times_faster: float
    equal: bool | None


def without_cache(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """Each token recomputes everything before it: a request of its own for each."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    tokens: list[int] = []
    started_s = time.perf_counter()
    while len(tokens) < num_new and (not tokens or time.perf_counter() - started_s < NO_CACHE_LIMIT_S):
        # A cache domain of its own: nobody's keys and values can be found there.
        tokens += llm.generate([*prompt, *tokens], params, cache_domain=f"without cache {len(tokens)}").token_ids
    return Climb(len(tokens), time.perf_counter() - started_s, tuple(tokens))


def with_cache(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """Keys and values are kept: each token computes one row."""
    started_s = time.perf_counter()
    completion = llm.generate(prompt, _greedy(num_new), cache_domain="with cache")
    return Climb(completion.num_completion_tokens, time.perf_counter() - started_s, tuple(completion.token_ids))


def batch_of_eight(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """Eight different requests share each reading of the weights; the first one is the common prompt."""
    others = distinct_prompts(llm.tokenizer, BATCH - 1, len(prompt))
    started_s = time.perf_counter()
    completions = llm.generate([list(prompt), *others], _greedy(num_new), cache_domain="batch")
    elapsed_s = time.perf_counter() - started_s
    return Climb(sum(done.num_completion_tokens for done in completions), elapsed_s, tuple(completions[0].token_ids))


TECHNIQUES: tuple[Technique, ...] = (
    Technique("no KV cache (all recomputed each token)", without_cache),
    Technique("KV cache", with_cache),
    Technique(f"batch of {BATCH}", batch_of_eight),
)


def climb_ladder(
    llm: LLM, prompt: Sequence[int], num_new: int, techniques: Sequence[Technique] = TECHNIQUES
) -> Iterator[Rung]:
    """The rungs, each as soon as it is measured."""
    first: Climb | None = None
    above: Climb | None = None
    for technique in techniques:
        climb = technique.climb(llm, prompt, num_new)
        first = first or climb
        yield Rung(
            technique=technique.name,
            tokens_per_s=climb.tokens_per_s,
            times_faster=climb.tokens_per_s / first.tokens_per_s,
            equal=None if above is None else _same_as_far(above.tokens, climb.tokens),
        )
        above = climb


def _same_as_far(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the shorter is the beginning of the longer."""
    common = min(len(one), len(other))
    return one[:common] == other[:common]


def _greedy(num_new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
