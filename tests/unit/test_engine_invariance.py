"""What a request gets depends on nothing but the request: not on neighbours, budgets, arrival, aborts or preemption."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from fake_executor import FakeExecutor, FakeTokenizer, tiny_model

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.outputs import Completion, Timing
from paceline.params import SamplingParams

SHORT_FIRST = (0, 2, 4, 5, 7, 1, 3, 6)
MODEL = tiny_model(context_length=160)
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True)),
    (list(range(70)), SamplingParams(max_tokens=30, temperature=0.8, seed=5, logprobs=2)),
    ([9] * 33, SamplingParams(max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True)),
    (list(range(40, 90)), SamplingParams(max_tokens=20, prompt_logprobs=3, logprobs=0, ignore_eos=True)),
    ([4], SamplingParams(max_tokens=50, stop=("a", "Z1"), min_tokens=5)),
    ([8, 7], SamplingParams(temperature=1.2, seed=11, min_tokens=30, logit_bias={3: 2.0, 96: 3.0})),
    ([60] * 64, SamplingParams(max_tokens=33, presence_penalty=1.0, prompt_logprobs=0, ignore_eos=True)),
    ([11, 12], SamplingParams(max_tokens=25, temperature=0.5, seed=0, logprobs=5, ignore_eos=True)),
]


def serve(
    order: Sequence[int],
    *,
    pages: int = 64,
    max_batch: int = 8,
    budget: int = 256,
    max_outputs: int = 64,
    arrivals: int = 100,
    abort_every: int = 0,
    preempt_every: int = 0,
    prefix_cache: bool = True,
) -> tuple[dict[int, Completion], Engine]:
    """Serves requests in that order, ``arrivals`` of them a step.

    Every ``abort_every`` steps a neighbour comes, to be aborted at the next; every ``preempt_every`` one is preempted.
    """
    executor = FakeExecutor(model=MODEL, num_pages=pages, max_outputs=max_outputs)
    config = EngineConfig(max_batch=max_batch, token_budget=budget, prefix_cache=prefix_cache)
    engine = Engine(executor, FakeTokenizer(), config)
    index = {}
    left = list(order)
    answers: dict[int, Completion] = {}
    doomed = None
    step = 0
    while left or engine.has_work:
        for at in left[:arrivals]:
            request = engine.make_request(*REQUESTS[at])
            index[request] = at
            engine.add(request)
        left = left[arrivals:]
        if abort_every and step % abort_every == 0 and index:
            if doomed is not None:
                engine.abort(doomed)
            doomed = None
            if left or len(answers) < len(order):
                doomed = engine.make_request(list(range(50)), SamplingParams(ignore_eos=True))
                engine.add(doomed)
        running = engine.scheduler.running
        if preempt_every and running and step % preempt_every == 0:
            engine.scheduler._preempt(running[step // preempt_every % len(running)])
        for update in engine.step():
            if update.request in index and update.completion is not None:
                answers[index[update.request]] = dataclasses.replace(
                    update.completion, timing=Timing(), num_cached_tokens=0, num_wasted_tokens=0
                )
        engine.scheduler.check()
        step += 1
    assert engine.stats().pages_used == 0
    return answers, engine


@pytest.fixture(scope="module")
def alone() -> dict[int, Completion]:
    """Each request served by an engine of its own."""
    return {at: serve([at], max_batch=1)[0][at] for at in range(len(REQUESTS))}


def test_the_cases_end_in_different_ways(alone: dict[int, Completion]) -> None:
    assert {completion.finish_reason for completion in alone.values()} == {"stop", "length"}


@pytest.mark.parametrize("budget", [8, 9, 17, 31, 64, 256])
def test_budgets(alone: dict[int, Completion], budget: int) -> None:
    assert serve(range(8), budget=budget)[0] == alone


@pytest.mark.parametrize("max_batch", [1, 2, 3, 5, 8])
def test_batch_sizes(alone: dict[int, Completion], max_batch: int) -> None:
    assert serve(range(8), max_batch=max_batch)[0] == alone


@pytest.mark.parametrize("max_outputs", [8, 9, 13, 256])
def test_bounds_on_outputs(alone: dict[int, Completion], max_outputs: int) -> None:
    assert serve(range(8), max_outputs=max_outputs)[0] == alone


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 2, 7, 1, 5, 4]])
@pytest.mark.parametrize("arrivals", [1, 3])
def test_arrivals(alone: dict[int, Completion], order: list[int], arrivals: int) -> None:
    assert serve(order, arrivals=arrivals)[0] == alone


@pytest.mark.parametrize("abort_every", [1, 4, 11])
def test_aborted_neighbours(alone: dict[int, Completion], abort_every: int) -> None:
    assert serve(range(8), abort_every=abort_every, budget=20)[0] == alone


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize(("pages", "order"), [(5, range(8)), (6, SHORT_FIRST), (8, SHORT_FIRST)])
def test_preemption(alone: dict[int, Completion], pages: int, order: Sequence[int], prefix_cache: bool) -> None:
    answers, engine = serve(order, pages=pages, budget=64, prefix_cache=prefix_cache)
    assert answers == alone
    stats = engine.stats()
    assert stats.preemptions > 0
    assert prefix_cache or stats.wasted_tokens > 0
    assert stats.rows - stats.wasted_tokens + stats.cache_saved_tokens == sum(
        completion.num_prompt_tokens + completion.num_completion_tokens - 1 for completion in answers.values()
    )


@pytest.mark.parametrize("preempt_every", [5, 7])
@pytest.mark.parametrize("budget", [30, 64, 256])
def test_preemption_of_anyone_at_any_time(alone: dict[int, Completion], preempt_every: int, budget: int) -> None:
    answers, engine = serve(range(8), budget=budget, preempt_every=preempt_every)
    assert answers == alone
    assert engine.stats().preemptions > 5


def test_a_page_table_error_would_show() -> None:
    """The tool itself: with a wrong entry in a page table the answer changes."""
    executor = FakeExecutor(model=MODEL)
    engine = Engine(executor, FakeTokenizer(), EngineConfig(max_batch=8))
    request = engine.make_request(list(range(70)), SamplingParams(max_tokens=30, ignore_eos=True))
    engine.add(request)
    for _ in range(10):
        engine.step()
    engine.scheduler.kv.table[request.slot, 0] = 40
    while engine.has_work:
        engine.step()
    right = serve([1], max_batch=1)
    free = Engine(FakeExecutor(model=MODEL), FakeTokenizer(), EngineConfig(max_batch=8))
    same = free.make_request(list(range(70)), SamplingParams(max_tokens=30, ignore_eos=True))
    free.add(same)
    while free.has_work:
        free.step()
    assert right[1].stats().preemptions == 0
    assert request.tokens[:80] == same.tokens[:80]
    assert request.tokens != same.tokens


def test_prompt_logprobs_row_by_row(alone: dict[int, Completion]) -> None:
    """Steps of one row inside a prompt look like decodes and are none."""
    assert serve([3], max_batch=1, budget=1)[0] == {3: alone[3]}
    assert serve([6, 0], max_batch=2, budget=2)[0] == {6: alone[6], 0: alone[0]}
