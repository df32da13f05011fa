"""What the prefix cache gains: requests over one long beginning, and a chat whose every turn contains those before.

Both compare with the same work in cold caches, in turns in one process, and assert that the tokens are the same.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ParameterError
from paceline.measure.prompts import QUESTIONS, distinct_prompts, prompt_tokens
from paceline.measure.record import Measurement
from paceline.measure.roofline import PeaksProbe, Traffic, measure_peaks, prefill_work, shared_prefix_work
from paceline.measure.runs import Report, checked, cold_domain, exactly, path_peaks, quiet, repeat
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.outputs import Completion
    from paceline.llm import LLM


def measure_prefix(
    llm: LLM,
    traffic: Traffic,
    *,
    num_requests: int = 32,
    num_prefix: int = 1024,
    num_tail: int = 32,
    num_new: int = 32,
    num_runs: int = 3,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """How many times faster ``num_requests`` requests are, of which the engine's ``max_batch`` run at a time, when all
    share a cache than when each has its own. Prompts are ``num_prefix`` common tokens and ``num_tail`` different ones.

    A run does both; no cache holds anything when it starts.
    """
    _needs_cache(llm)
    prefix = prompt_tokens(llm.tokenizer, num_prefix)
    prompts = [prefix + tail for tail in distinct_prompts(llm.tokenizer, num_requests, num_tail)]
    _answer(llm, prompts, [cold_domain()] * num_requests, num_new)  # warms up; the other half would take too long
    report(1, num_runs + 1)
    runs: list[tuple[_Load, _Load]] = []
    for index in range(num_runs):
        shared = _answer(llm, prompts, [cold_domain()] * num_requests, num_new)
        alone = _answer(llm, prompts, [cold_domain() for _ in prompts], num_new)
        assert shared.tokens == alone.tokens, "the prefix cache has changed an answer"
        assert alone.saved_tokens == 0, "a request found what another computed, across cache domains"
        runs.append((shared, alone))
        report(index + 2, num_runs + 1)
    with_s = statistics.median(shared.elapsed_s for shared, _ in runs)
    speedups = tuple(alone.elapsed_s / shared.elapsed_s for shared, alone in runs)
    concurrency = min(llm.config.max_batch, num_requests)
    sizes = {"num_prefix": num_prefix, "num_tail": num_tail, "num_new": num_new, "num_requests": num_requests}
    return Measurement(
        metric="prefix_speedup",
        runs=speedups,
        path=llm.path(),
        work=shared_prefix_work(traffic, **sizes, concurrency=concurrency),
        peaks=path_peaks(llm, probe),
        achieved_tokens_per_s=num_requests * num_new / with_s,
        details={
            "with_s": with_s,
            "without_s": statistics.median(alone.elapsed_s for _, alone in runs),
            "speedup": statistics.median(speedups),
            "with_runs_s": [shared.elapsed_s for shared, _ in runs],
            "without_runs_s": [alone.elapsed_s for _, alone in runs],
            "query_tokens": shared.query_tokens,
            "hit_tokens": shared.hit_tokens,
            "saved_tokens": shared.saved_tokens,
            "requests": num_requests,
            "concurrency": concurrency,
            "prefix_tokens": num_prefix,
            "tail_tokens": num_tail,
            "new_tokens": num_new,
        },
    )


def measure_chat(
    llm: LLM,
    traffic: Traffic,
    *,
    num_turns: int = len(QUESTIONS),
    num_new: int = 48,
    num_runs: int = 3,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """The time to the first token of a chat's last turn, as a share of what the same text takes in a cold cache.

    Answers have ``num_new`` tokens; each turn sends the whole conversation again, as text, as a client does.
    """
    _needs_cache(llm)
    if not 2 <= num_turns <= len(QUESTIONS):
        raise ParameterError("turns", num_turns, f"between 2 and {len(QUESTIONS)}")

    def one() -> tuple[list[Completion], Completion]:
        turns, prompt = _converse(llm, num_turns, num_new)
        cold = checked(llm.generate(prompt, _without_end(1), cache_domain=cold_domain()), 1)
        assert cold.num_cached_tokens == 0
        assert cold.token_ids == turns[-1].token_ids[:1], "the prefix cache has changed an answer"
        return turns, cold

    runs = repeat(one, num_runs, report)
    last = [turns[-1] for turns, _ in runs]
    ttft_s = [statistics.median(turns[at].timing.ttft_s for turns, _ in runs) for at in range(num_turns)]
    shares = tuple(turns[-1].timing.ttft_s / cold.timing.ttft_s for turns, cold in runs)
    num_computed = last[-1].num_prompt_tokens - last[-1].num_cached_tokens
    work = prefill_work(
        traffic, num_tokens=num_computed, chunk=llm.config.token_budget, num_cached=last[-1].num_cached_tokens
    )
    return Measurement(
        metric="chat_ttft_share",
        runs=shares,
        path=llm.path(),
        work=work,
        peaks=path_peaks(llm, probe),
        achieved_tokens_per_s=num_computed / ttft_s[-1],
        details={
            "ttft_s": ttft_s,
            "cold_ttft_s": statistics.median(cold.timing.ttft_s for _, cold in runs),
            "share": statistics.median(shares),
            "prompt_tokens": [turn.num_prompt_tokens for turn in runs[-1][0]],
            "cached_tokens": [turn.num_cached_tokens for turn in runs[-1][0]],
            "new_tokens": num_new,
            "chat_template": llm.chat_template is not None,
        },
    )


@dataclass(frozen=True)
class _Load:
    """All answers to a list of prompts, the seconds they took, and what the prefix cache did meanwhile."""

    elapsed_s: float
    tokens: list[list[int]]
    query_tokens: int
    hit_tokens: int
    saved_tokens: int


def _needs_cache(llm: LLM) -> None:
    if not llm.config.prefix_cache:
        raise ParameterError("prefix_cache", False, "True: it is what this benchmark measures")


def _answer(llm: LLM, prompts: Sequence[list[int]], domains: Sequence[str], num_new: int) -> _Load:
    """Answers all prompts, each in its cache domain."""
    params = exactly(num_new)

    async def answers() -> list[Completion]:
        asked = (llm.agenerate(prompt, params, cache_domain=domain) for prompt, domain in pairs)
        return await asyncio.gather(*asked)

    pairs = list(zip(prompts, domains, strict=True))
    before = llm.stats()
    started_s = time.perf_counter()
    completions = asyncio.run(answers())
    elapsed_s = time.perf_counter() - started_s
    after = llm.stats()
    return _Load(
        elapsed_s,
        [list(checked(done, num_new).token_ids) for done in completions],
        after.cache_query_tokens - before.cache_query_tokens,
        after.cache_hit_tokens - before.cache_hit_tokens,
        after.cache_saved_tokens - before.cache_saved_tokens,
    )


def _without_end(num_new: int) -> SamplingParams:
    """So many tokens, none of them an end: its own would not be part of the text that the next turn sends."""
    return SamplingParams(min_tokens=num_new, max_tokens=num_new)


def _converse(llm: LLM, num_turns: int, num_new: int) -> tuple[list[Completion], list[int]]:
    """The answers of a chat that starts with a cold cache, and the prompt of its last turn."""
    domain = cold_domain()
    params = _without_end(num_new)
    messages: list[dict[str, str]] = []
    turns: list[Completion] = []
    prompt: list[int] = []
    for question in QUESTIONS[:num_turns]:
        messages.append({"role": "user", "content": question})
        prompt = _chat_prompt(llm, messages)
        turns.append(checked(llm.generate(prompt, params, cache_domain=domain), num_new))
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns, prompt


def _chat_prompt(llm: LLM, messages: Sequence[dict[str, str]]) -> list[int]:
    """By the model's template; a model without one gets plain lines, without blanks that its answers bring along."""
    if llm.chat_template is not None:
        return llm.chat_tokens(messages)
    lines = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
    return llm.tokenizer.encode(lines + "assistant:")
