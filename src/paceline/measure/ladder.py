"""The ladder: the same answer by one technique after the other, each with its rate and whether its tokens are those of
the step before.

A technique is one entry of ``TECHNIQUES``: a name and a function. Adding one needs nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.measure.prompts import distinct_prompts, prompt_tokens
from paceline.measure.runs import cold_domain, exactly

if TYPE_CHECKING:
    from paceline.config import KVFormat
    from paceline.llm import LLM

NO_CACHE_LIMIT_S = 15.0
"""On a slow machine the row without a cache stops here; its rate and its tokens count as far as they go."""

BATCH = 8

TEXT_TIMES = 12
"""The long text is so many times as long as an answer, so that it is shorter on a slow machine too."""


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
    """A way to compute the answer to ``prompt`` in ``num_new`` tokens.

    starts_anew  it answers another prompt than the row above, and is what the rows below are compared with
    exact        its tokens must be those of the row above; without, they may part by rounding
    kv_dtype     the format of keys and values of an engine of its own
    drafts       tokens are drafted and verified, as far as it pays
    """

    name: str
    climb: Callable[[LLM, Sequence[int], int], Climb]
    starts_anew: bool = False
    exact: bool = True
    kv_dtype: KVFormat | None = None
    drafts: bool = False


@dataclass(frozen=True)
class Rung:
    """A row of the ladder. Of ``num_compared`` tokens the first ``num_equal`` are those of the row above; None where
    nothing is compared. ``times_faster`` counts from the last row that started anew, or from the first."""

    technique: Technique
    tokens_per_s: float
    times_faster: float
    num_equal: int | None
    num_compared: int

    @property
    def equal(self) -> bool | None:
        """Whether all are equal."""
        return None if self.num_equal is None else self.num_equal == self.num_compared


def without_cache(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """Each token recomputes everything before it: a request of its own for each, in a cache of its own."""
    tokens: list[int] = []
    started_s = time.perf_counter()
    while len(tokens) < num_new and (not tokens or time.perf_counter() - started_s < NO_CACHE_LIMIT_S):
        tokens += llm.generate([*prompt, *tokens], exactly(1), cache_domain=cold_domain()).token_ids
    return Climb(len(tokens), time.perf_counter() - started_s, tuple(tokens))


def with_cache(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """Keys and values are kept: each token computes one row."""
    return _timed(llm, prompt, num_new, cold_domain())


def batch_of_eight(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """Eight different requests share each reading of the weights; the first one is the common prompt."""
    others = distinct_prompts(llm.tokenizer, BATCH - 1, len(prompt))
    started_s = time.perf_counter()
    completions = llm.generate([list(prompt), *others], exactly(num_new), cache_domain=cold_domain())
    elapsed_s = time.perf_counter() - started_s
    return Climb(sum(done.num_completion_tokens for done in completions), elapsed_s, tuple(completions[0].token_ids))


def after_long_text(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """The prompt behind a long text, all of it computed."""
    return _timed(llm, [*_long_text(llm, prompt, num_new), *prompt], num_new, cold_domain())


def with_prefix_cache(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """The prompt behind a long text that somebody asked about before, which is not timed."""
    text, domain = _long_text(llm, prompt, num_new), cold_domain()
    llm.generate([*text, *prompt_tokens(llm.tokenizer, 1, offset=1)], exactly(1), cache_domain=domain)
    return _timed(llm, [*text, *prompt], num_new, domain)


def repeated(llm: LLM, prompt: Sequence[int], num_new: int) -> Climb:
    """A text that is to be repeated: each token is a pass, or with drafts several are."""
    return _timed(llm, _text_to_repeat(llm, num_new), num_new, cold_domain())


TECHNIQUES: tuple[Technique, ...] = (
    Technique("no KV cache (all recomputed each token)", without_cache),
    Technique("KV cache", with_cache),
    Technique(f"batch of {BATCH}", batch_of_eight),
    Technique("a text to be repeated", repeated, starts_anew=True),
    Technique("speculation (tokens drafted from the text)", repeated, drafts=True),
    Technique("a question after a long text", after_long_text, starts_anew=True),
    Technique("prefix cache (the text was asked about before)", with_prefix_cache),
    Technique("int8 KV, with the prefix cache", with_prefix_cache, exact=False, kv_dtype="int8"),
)


def climb_ladder(
    llm: LLM,
    prompt: Sequence[int],
    num_new: int,
    techniques: Sequence[Technique] = TECHNIQUES,
    *,
    open_llm: Callable[[KVFormat], LLM],
) -> Iterator[Rung]:
    """The rungs, each as soon as it is measured. ``open_llm`` loads the same model with another format of keys and
    values."""
    base: Climb | None = None
    above: Climb | None = None
    for technique in techniques:
        with (
            contextlib.nullcontext(llm) if technique.kv_dtype is None else open_llm(technique.kv_dtype) as engine,
            contextlib.nullcontext() if technique.drafts else engine.without_drafts(),
        ):
            climb = technique.climb(engine, prompt, num_new)
        if base is None or technique.starts_anew:
            base, above = climb, None
        yield Rung(
            technique=technique,
            tokens_per_s=climb.tokens_per_s,
            times_faster=climb.tokens_per_s / base.tokens_per_s,
            num_equal=None if above is None else _num_common(above.tokens, climb.tokens),
            num_compared=0 if above is None else min(len(above.tokens), len(climb.tokens)),
        )
        above = climb


def _timed(llm: LLM, prompt: Sequence[int], num_new: int, domain: str) -> Climb:
    """One request, its prompt's time included."""
    started_s = time.perf_counter()
    completion = llm.generate(prompt, exactly(num_new), cache_domain=domain)
    return Climb(completion.num_completion_tokens, time.perf_counter() - started_s, tuple(completion.token_ids))


def _text_to_repeat(llm: LLM, num_new: int) -> list[int]:
    """A request to repeat about as much text as there will be answer; without a chat template, the text and its
    beginning."""
    text = prompt_tokens(llm.tokenizer, num_new)
    if llm.chat_template is None:
        return [*text, *text[: max(1, num_new // 4)]]
    words = llm.tokenizer.decode(text)
    return llm.chat_tokens(
        [{"role": "user", "content": f"Repeat this text word by word, and nothing else:\n\n{words}"}]
    )


def _long_text(llm: LLM, prompt: Sequence[int], num_new: int) -> list[int]:
    """As much of it as the context has room for."""
    context_length = llm.config.context_length
    assert context_length is not None
    room = context_length - len(prompt) - num_new
    return prompt_tokens(llm.tokenizer, max(0, min(TEXT_TIMES * num_new, room)))


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens from the beginning that are equal."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
