"""Workloads on one engine: decode, prefill, and a batch of requests. Each returns a measurement with the limit of the
same minute.

Definitions: t0 submitted, t1 first token, tn last token, n output tokens. Decode is (n-1)/(tn-t1); prefill is prompt
tokens over t1-t0; a batch's figure is all output tokens over the time from the first submission to the last token.
Each run starts with a cold cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import ParameterError
from paceline.measure.prompts import distinct_prompts, prompt_tokens
from paceline.measure.record import Measurement
from paceline.measure.roofline import PeaksProbe, Traffic, batch_work, decode_work, measure_peaks, prefill_work
from paceline.measure.runs import Report, checked, cold_domain, exactly, path_peaks, percentiles, quiet, repeat

if TYPE_CHECKING:
    from paceline.engine.outputs import Completion
    from paceline.llm import LLM


def measure_decode(
    llm: LLM,
    traffic: Traffic,
    *,
    num_prompt: int = 64,
    num_new: int = 256,
    num_runs: int = 5,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """Tokens a second of one request while it generates ``num_new`` tokens after ``num_prompt``: its depth in the
    cache."""
    if num_new < 2:
        raise ParameterError("new_tokens", num_new, "at least 2: the first token's time is the prompt's")
    prompt = prompt_tokens(llm.tokenizer, num_prompt)

    def one() -> Completion:
        return _generate(llm, prompt, num_new)

    completions = repeat(one, num_runs, report)
    runs = [(num_new - 1) / (done.timing.e2e_s - done.timing.ttft_s) for done in completions]
    return Measurement(
        metric="decode_tokens_per_s",
        runs=tuple(runs),
        path=llm.path(),
        work=decode_work(traffic, depth=num_prompt, num_new=num_new),
        peaks=path_peaks(llm, probe),
        details={"prompt_tokens": num_prompt, "new_tokens": num_new},
    )


def measure_prefill(
    llm: LLM,
    traffic: Traffic,
    *,
    num_prompt: int = 1024,
    num_runs: int = 5,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """Prompt tokens a second of one request until its first token."""
    prompt = prompt_tokens(llm.tokenizer, num_prompt)
    completions = repeat(lambda: _generate(llm, prompt, 1), num_runs, report)
    return Measurement(
        metric="prefill_tokens_per_s",
        runs=tuple(num_prompt / done.timing.ttft_s for done in completions),
        path=llm.path(),
        work=prefill_work(traffic, num_tokens=num_prompt, chunk=llm.config.token_budget),
        peaks=path_peaks(llm, probe),
        details={"prompt_tokens": num_prompt, "chunk_tokens": llm.config.token_budget},
    )


def measure_batch(
    llm: LLM,
    traffic: Traffic,
    *,
    num_requests: int = 64,
    num_prompt: int = 128,
    num_new: int = 128,
    num_runs: int = 5,
    report: Report = quiet,
    probe: PeaksProbe = measure_peaks,
) -> Measurement:
    """Output tokens a second of ``num_requests`` requests of which the engine's ``max_batch`` run at a time (a closed
    loop)."""
    prompts = distinct_prompts(llm.tokenizer, num_requests, num_prompt)
    params = exactly(num_new)
    concurrency = llm.config.max_batch

    def one() -> tuple[float, list[Completion]]:
        started_s = time.perf_counter()
        completions = llm.generate(prompts, params, cache_domain=cold_domain())
        elapsed_s = time.perf_counter() - started_s
        assert isinstance(completions, list)
        return elapsed_s, [checked(done, num_new) for done in completions]

    results = repeat(one, num_runs, report)
    completions = [done for _, run in results for done in run]
    return Measurement(
        metric="output_tokens_per_s",
        runs=tuple(num_requests * num_new / elapsed_s for elapsed_s, _ in results),
        path=llm.path(),
        work=batch_work(traffic, num_prompt=num_prompt, num_new=num_new, concurrency=min(concurrency, num_requests)),
        peaks=path_peaks(llm, probe),
        details={
            "requests": num_requests,
            "concurrency": concurrency,
            "prompt_tokens": num_prompt,
            "new_tokens": num_new,
            "ttft_s": percentiles([done.timing.ttft_s for done in completions]),
            "tpot_s": percentiles([done.timing.tpot_s for done in completions]),
        },
    )


def _generate(llm: LLM, prompt: Sequence[int], num_new: int) -> Completion:
    completion = llm.generate(prompt, exactly(num_new), cache_domain=cold_domain())
    assert not isinstance(completion, list)
    return checked(completion, num_new)
