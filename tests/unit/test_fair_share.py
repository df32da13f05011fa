"""Shares take turns: who has many requests in the queue delays nobody else's, and has places of its own."""

from __future__ import annotations

import pytest
from fake_executor import FakeExecutor, FakeTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.errors import OverloadError
from paceline.params import SamplingParams


def make_engine(*, max_batch: int, max_queue: int | None = None, num_shares: int = 1, pages: int = 64) -> Engine:
    engine = Engine(
        FakeExecutor(num_pages=pages), FakeTokenizer(), EngineConfig(max_batch=max_batch, max_queue=max_queue)
    )
    engine.num_shares = num_shares
    return engine


def add(engine: Engine, share: str, *, max_tokens: int = 2) -> Request:
    request = engine.make_request([1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True), share=share)
    engine.add(request)
    return request


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_thousand_waiting_requests_delay_another_share_by_the_running_batch_alone(max_batch: int) -> None:
    engine = make_engine(max_batch=max_batch)
    for _ in range(1000):
        add(engine, "many")
    engine.step()
    before = list(engine.scheduler.running)
    single = add(engine, "one")
    ended: list[Request] = []
    while single.started_s is None:
        ended += [update.request for update in engine.step()]
    assert set(ended) <= set(before)
    assert len(engine.scheduler.waiting) > 1000 - 3 * max_batch


def test_the_batch_is_divided_evenly_and_nobody_starves() -> None:
    engine = make_engine(max_batch=4)
    requests = [add(engine, share, max_tokens=20) for share in ["a"] * 8 + ["b"] * 8]
    engine.step()
    assert sorted(request.share for request in engine.scheduler.running) == ["a", "a", "b", "b"]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert all(request.finish_reason == "length" for request in requests)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=40),
)
@settings(deadline=None, max_examples=40)
def test_who_runs_nothing_waits_for_one_request_of_each_other_share_at_most(
    max_batch: int, arrivals: list[tuple[str, int, int]]
) -> None:
    engine = make_engine(max_batch=max_batch)
    passed: dict[Request, int] = {}  # of requests that came to a share without any: others that were admitted since
    admitted: set[Request] = set()

    def step() -> None:
        engine.step()
        new = [request for request in requests if request.started_s is not None and request not in admitted]
        admitted.update(new)
        for waiting in [request for request in passed if request not in admitted]:
            passed[waiting] += len(new)
            assert passed[waiting] <= 2

    requests: list[Request] = []
    for share, max_tokens, num_steps in arrivals:
        is_first = all(request.share != share or request.finish_reason is not None for request in requests)
        requests.append(add(engine, share, max_tokens=max_tokens))
        if is_first:
            passed[requests[-1]] = 0
        for _ in range(num_steps if engine.has_work else 0):
            if engine.has_work:
                step()
    while engine.has_work:
        step()
    assert all(request.finish_reason == "length" for request in requests)


def test_each_share_has_places_of_its_own() -> None:
    engine = make_engine(max_batch=2, max_queue=5, num_shares=2)
    for _ in range(2 + 3):
        add(engine, "many")
    with pytest.raises(OverloadError, match="3 requests of this share wait and this share's part of the queue holds 3"):
        add(engine, "many")
    for _ in range(3):
        add(engine, "one")
    with pytest.raises(OverloadError) as caught:
        add(engine, "one")
    assert (caught.value.num_waiting, caught.value.max_queue) == (3, 3)
    engine.step()
    assert sorted(request.share for request in engine.scheduler.running) == ["many", "one"]
    add(engine, "one")
