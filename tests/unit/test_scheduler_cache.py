"""Who is admitted next when some beginnings are cached, what the counters of the cache say, and a full queue."""

from __future__ import annotations

import pytest
from fake_executor import FakeExecutor, FakeTokenizer

from paceline.config import PAGE_TOKENS, EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.scheduler import MAX_PASSED
from paceline.errors import OverloadError
from paceline.params import SamplingParams

CACHED = [5] * (3 * PAGE_TOKENS)
"""A beginning that each test computes before it looks."""


def make_engine(*, max_batch: int = 1, max_queue: int | None = None, prefix_cache: bool = True) -> Engine:
    config = EngineConfig(max_batch=max_batch, max_queue=max_queue, prefix_cache=prefix_cache, max_gap_ms=None)
    return Engine(FakeExecutor(), FakeTokenizer(), config)


def add(engine: Engine, prompt: list[int], *, prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    request = engine.make_request(prompt, params)
    engine.add(request)
    return request


def finish(engine: Engine) -> list[Request]:
    """Runs all there is; the requests in the order in which they ended."""
    order = []
    while engine.has_work:
        order += [update.request for update in engine.step()]
        engine.scheduler.check()
    return order


def warm(engine: Engine) -> None:
    """Computes ``CACHED``, and one token more."""
    add(engine, [*CACHED, 6])
    finish(engine)


def test_the_longest_cached_beginning_is_admitted_first() -> None:
    engine = make_engine()
    warm(engine)
    unknown, page, all_three, known = (
        add(engine, prompt)
        for prompt in ([9] * 40, CACHED[:PAGE_TOKENS] + [9] * 9, CACHED + [9] * 9, [*CACHED[:PAGE_TOKENS], 8])
    )
    assert finish(engine) == [all_three, page, known, unknown], "of equals the one that came first"


def test_without_a_cache_they_run_as_they_came() -> None:
    engine = make_engine(prefix_cache=False)
    warm(engine)
    requests = [add(engine, prompt) for prompt in ([9] * 40, CACHED + [9] * 9)]
    assert finish(engine) == requests


def test_who_was_passed_often_enough_is_the_next() -> None:
    engine = make_engine()
    warm(engine)
    unknown = add(engine, [9] * 40)
    # Other first tokens after the known beginning: all know equally much.
    passing = [add(engine, [*CACHED, 10 + at]) for at in range(MAX_PASSED + 4)]
    order = finish(engine)
    assert order == [*passing[:MAX_PASSED], unknown, *passing[MAX_PASSED:]]
    assert unknown.num_passed == MAX_PASSED


def counts(engine: Engine) -> tuple[int, int, int]:
    """Tokens looked up, found, and not computed."""
    stats = engine.stats()
    return stats.cache_query_tokens, stats.cache_hit_tokens, stats.cache_saved_tokens


@pytest.mark.parametrize(
    ("tail", "prompt_logprobs", "found", "saved"),
    [
        ([9] * 9, None, len(CACHED), len(CACHED)),
        ([6, 9], None, len(CACHED) + 1, len(CACHED) + 1),
        ([6], None, len(CACHED) + 1, len(CACHED)),  # the last token's logits are wanted
        ([9] * 9, 0, len(CACHED), 0),  # and here all are
    ],
    ids=["whole pages", "and a part of one", "all", "prompt_logprobs"],
)
def test_what_is_found_and_what_it_saves(tail: list[int], prompt_logprobs: int | None, found: int, saved: int) -> None:
    engine = make_engine()
    warm(engine)
    assert counts(engine) == (len(CACHED) + 1, 0, 0)
    rows = engine.stats().rows
    request = add(engine, CACHED + tail, prompt_logprobs=prompt_logprobs)
    finish(engine)
    asked = len(CACHED) + len(tail)
    assert counts(engine) == (len(CACHED) + 1 + asked, found, saved)
    assert request.num_cached == saved
    assert engine.stats().rows - rows == asked - saved, "what is saved is not computed, all else is"


def test_nothing_is_counted_as_found_without_a_cache() -> None:
    engine = make_engine(prefix_cache=False)
    warm(engine)
    warm(engine)
    assert counts(engine)[1:] == (0, 0)


def test_an_idle_engine_takes_a_batch_and_a_queue() -> None:
    engine = make_engine(max_batch=2, max_queue=3)
    for at in range(2 + 3):
        add(engine, [1 + at] * 4)
    with pytest.raises(OverloadError) as caught:
        add(engine, [9] * 4)
    assert (caught.value.num_waiting, caught.value.max_queue) == (3, 3)
    assert "3 requests wait and the queue holds 3" in str(caught.value)
    assert len(finish(engine)) == 5, "the one that was refused is forgotten"


def test_a_busy_engine_takes_a_queue() -> None:
    engine = make_engine(max_batch=2, max_queue=3)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for at in range(2):
        engine.add(engine.make_request([1 + at] * 4, params))
    engine.step()
    for at in range(3):
        add(engine, [3 + at] * 4)
    with pytest.raises(OverloadError) as caught:
        add(engine, [9] * 4)
    assert (caught.value.num_waiting, caught.value.max_queue) == (3, 3)
    finish(engine)
    add(engine, [9] * 4)
