"""Workloads on one engine: decode, prefill, and a batch of requests. Each returns a measurement with the limit of the
same minute.

Definitions: t0 submitted, t1 first token, tn last token, n output tokens. Decode is (n-1)/(tn-t1); prefill is prompt
tokens over t1-t0; a batch's figure is all output tokens over the time from the first submission to the last token.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import ParameterError
from paceline.measure.prompts import distinct_prompts, prompt_tokens
from paceline.measure.record import Measurement
from paceline.measure.roofline import (
    PeaksProbe,
    Traffic,
    batch_work,
    decode_work,
    measure_peaks,
    prefill_work,
)
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.outputs import Completion
    from paceline.llm import LLM

Report = Callable[[int, int], None]
"""Called with (runs done, runs in all)."""


def quiet(done: int, total: int) -> None:
    """Reports nothing."""


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

    completions = _repeat(one, num_runs, report)
    runs = [(num_new - 1) / (done.timing.e2e_s - done.timing.ttft_s) for done in completions]
    return Measurement(
        metric="decode_tokens_per_s",
        runs=tuple(runs),
        path=llm.path(),
        work=decode_work(traffic, depth=num_prompt, num_new=num_new),
        peaks=_peaks(llm, probe),
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
    # Another beginning each run: a prompt that was seen must not be found in a cache.
    prompts = distinct_prompts(llm.tokenizer, num_runs + 1, num_prompt)
    rest = iter(prompts)
    completions = _repeat(lambda: _generate(llm, next(rest), 1), num_runs, report)
    return Measurement(
        metric="prefill_tokens_per_s",
        runs=tuple(num_prompt / done.timing.ttft_s for done in completions),
        path=llm.path(),
        work=prefill_work(traffic, num_tokens=num_prompt, chunk=llm.config.token_budget),
        peaks=_peaks(llm, probe),
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
    params = _exactly(num_new)
    concurrency = llm.config.max_batch

    runs = itertools.count()

    def one() -> tuple[float, list[Completion]]:
        domain = f"batch {next(runs)}"  # nothing of the run before may be found in the prefix cache
        started_s = time.perf_counter()
        completions = llm.generate(prompts, params, cache_domain=domain)
        elapsed_s = time.perf_counter() - started_s
        assert isinstance(completions, list)
        return elapsed_s, [_checked(done, num_new) for done in completions]

    results = _repeat(one, num_runs, report)
    completions = [done for _, run in results for done in run]
    return Measurement(
        metric="output_tokens_per_s",
        runs=tuple(num_requests * num_new / elapsed_s for elapsed_s, _ in results),
        path=llm.path(),
        work=batch_work(traffic, num_prompt=num_prompt, num_new=num_new, concurrency=min(concurrency, num_requests)),
        peaks=_peaks(llm, probe),
        details={
            "requests": num_requests,
            "concurrency": concurrency,
            "prompt_tokens": num_prompt,
            "new_tokens": num_new,
            "ttft_s": _percentiles([done.timing.ttft_s for done in completions]),
            "tpot_s": _percentiles([done.timing.tpot_s for done in completions]),
        },
    )


def _generate(llm: LLM, prompt: Sequence[int], num_new: int) -> Completion:
    completion = llm.generate(prompt, _exactly(num_new))
    assert not isinstance(completion, list)
    return _checked(completion, num_new)


def _exactly(num_new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)


def _checked(completion: Completion, num_new: int) -> Completion:
    """The completion, once it is sure that it did all its work."""
    if completion.error is not None:
        raise completion.error
    assert completion.num_completion_tokens == num_new, (
        completion.num_completion_tokens,
        num_new,
        completion.finish_reason,
    )
    return completion


def _repeat(one: Callable[[], Any], num_runs: int, report: Report) -> list[Any]:
    """``num_runs`` results after one that warms caches and is thrown away."""
    results = []
    for index in range(num_runs + 1):
        results.append(one())
        report(index + 1, num_runs + 1)
    return results[1:]


def _peaks(llm: LLM, probe: PeaksProbe) -> Any:
    path = llm.path()
    return probe(str(path["isa"]), int(path["threads"]))


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": statistics.median(ordered), "p95": at(0.95), "p99": at(0.99)}
