"""An engine that breaks outside any request: who waited hears of it, and another takes its place, not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from byte_llm import byte_llm
from fake_executor import FakeExecutor, FakeTokenizer

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.parts import EngineParts
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.engine.stats import EngineStats
from paceline.errors import CacheDirectoryError, EngineStoppedError, PacelineError
from paceline.kv.store import PageStore
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.serve.keys import KeyRing
from paceline.serve.service import Service
from paceline.serve.settings import ServeSettings
from paceline.serve.supervisor import MAX_RESTARTS, RESTART_WINDOW_S, Supervisor
from paceline.speculate.counts import DrafterCounts, SpeculationCounts, ZeroReason

FEW = SamplingParams(max_tokens=12, ignore_eos=True)


class Panic(BaseException):
    """As a native library raises it: no Exception."""


@contextmanager
def broken_scheduler() -> Iterator[None]:
    """While it lasts no scheduler can plan."""

    def plan(self: Scheduler, max_prefill_rows: int | None = None) -> Schedule:
        raise Panic("a bug")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "plan", plan)
        yield


def break_it(llm: LLM) -> None:
    with broken_scheduler(), pytest.raises(EngineStoppedError, match="a bug"):
        llm.generate("abc", FEW)


def test_a_new_engine_answers_as_the_old_one_would_have() -> None:
    with byte_llm() as llm:
        llm.num_shares = 3
        expected = llm.generate("abc", FEW).token_ids
        with broken_scheduler(), pytest.raises(EngineStoppedError, match="a bug"):
            list(llm.stream("abc", FEW))
        assert llm.is_broken
        with pytest.raises(EngineStoppedError):
            llm.generate("abc", FEW)
        llm.restart()
        assert not llm.is_broken
        assert llm.generate("abc", FEW).token_ids == expected
        assert llm.num_shares == 3
        assert llm.stats().pages_used == 0
        assert llm.progress_age_s() == 0.0


def test_an_unseeded_request_draws_anew_after_a_restart() -> None:
    def draw(breaks: bool) -> list[int]:
        with byte_llm() as llm:
            if breaks:
                break_it(llm)
                llm.restart()
            else:
                llm.generate("abc", FEW)
            return llm.generate("abc", SamplingParams(temperature=1.0, max_tokens=12)).token_ids

    assert draw(breaks=True) == draw(breaks=False), "seeds follow from the number of requests before"


def test_totals_go_on_over_restarts_and_the_state_does_not() -> None:
    with byte_llm() as llm:
        seen = []
        for _ in range(3):
            llm.generate("abc", FEW)
            seen.append(llm.stats())
            break_it(llm)
            broken = llm.stats()
            llm.restart()
            assert totals(llm.stats()) == totals(broken)
            assert llm.stats().num_running == llm.stats().pages_used == llm.stats().pages_cached == 0
        first, _, last = seen
        for name in ("output_tokens", "requests_finished", "steps", "rows", "attended_tokens", "cache_query_tokens"):
            assert getattr(last, name) == 3 * getattr(first, name) > 0, name
        assert last.executor_s > first.executor_s > 0


def totals(stats: EngineStats) -> dict[str, object]:
    """What must never fall: all that is not of the moment."""
    now = {"num_running", "num_waiting", "pages_used", "pages_cached", "pages_touched", "pages_total"}
    return {name: value for name, value in vars(stats).items() if name not in now}


def test_counts_of_drafts_add_up_by_drafter_and_by_position() -> None:
    before = SpeculationCounts(
        steps=3,
        proposed=6,
        accepted=2,
        position_proposed=(3, 2, 1),
        position_accepted=(1, 1, 0),
        saved_s=0.5,
        draft_s=0.25,
        drafters={"a": DrafterCounts(2, 4, 2), "b": DrafterCounts(1, 2, 0)},
        zero_reason=ZeroReason.NO_MATCH,
        failure="it fell",
    )
    now = SpeculationCounts(
        steps=1,
        proposed=1,
        accepted=1,
        position_proposed=(1,),
        position_accepted=(1,),
        saved_s=0.5,
        draft_s=0.5,
        drafters={"b": DrafterCounts(1, 1, 1)},
    )
    assert now.after(before) == SpeculationCounts(
        steps=4,
        proposed=7,
        accepted=3,
        position_proposed=(4, 2, 1),
        position_accepted=(2, 1, 0),
        saved_s=1.0,
        draft_s=0.75,
        drafters={"a": DrafterCounts(2, 4, 2), "b": DrafterCounts(2, 3, 1)},
        failure="it fell",
    )
    assert SpeculationCounts().after(before).drafters == before.drafters


def test_one_that_runs_is_left_alone_and_a_closed_one_stays_closed() -> None:
    llm = byte_llm()
    llm.generate("abc", FEW)
    llm.restart()
    assert llm.stats().steps > 0
    llm.close()
    with pytest.raises(PacelineError, match="closed"):
        llm.restart()


def test_a_store_that_cannot_be_opened_again_is_done_without_and_said() -> None:
    def refuse() -> PageStore:
        raise CacheDirectoryError("here", "taken")

    parts = EngineParts(FakeExecutor(), FakeTokenizer(), EngineConfig(), lambda engine: None, refuse)
    with pytest.raises(CacheDirectoryError):
        parts.make()
    old = Engine(parts.executor, parts.tokenizer, parts.config)
    with pytest.warns(UserWarning, match="without the prefix cache on disk: here"):
        parts.make_again(old)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.001)


def test_a_service_turns_red_starts_the_engine_again_and_turns_green() -> None:
    async def scenario() -> None:
        service = Service(ServeSettings(), KeyRing({}), model="tiny")
        assert service.status == "loading"
        with byte_llm() as llm:
            service.use(llm)
            seen: list[str] = []
            llm.when_broken(lambda: seen.append(service.status))
            assert service.status == "ready"
            await asyncio.to_thread(break_it, llm)
            await until(lambda: service.num_restarts == 1)
            assert seen == ["broken"]
            assert service.status == "ready"
            assert len((await llm.agenerate("abc", FEW)).token_ids) == 12

    asyncio.run(scenario())


def test_an_engine_that_always_breaks_stays_broken_and_rare_breaks_are_forgiven() -> None:
    async def scenario() -> None:
        now_s = 0.0
        with byte_llm() as llm:
            broken: list[int] = []
            llm.when_broken(lambda: broken.append(1))
            supervisor = Supervisor(llm, clock=lambda: now_s)
            for count in range(1, MAX_RESTARTS + 2):
                now_s = RESTART_WINDOW_S * 2 if count == 2 else now_s
                await asyncio.to_thread(break_it, llm)
                await until(lambda count=count: supervisor.num_restarts == count)  # type: ignore[misc]
            assert not llm.is_broken, "the first was long ago"
            await asyncio.to_thread(break_it, llm)
            await until(lambda: len(broken) == MAX_RESTARTS + 2)
            await asyncio.sleep(0)  # what the engine's thread asked the loop for has run
            await asyncio.sleep(0)
            assert llm.is_broken
            assert supervisor.num_restarts == MAX_RESTARTS + 1
            assert supervisor.num_breaks == MAX_RESTARTS + 2

    asyncio.run(scenario())


def test_an_engine_that_does_not_start_again_stays_red_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        service = Service(ServeSettings(), KeyRing({}), model="tiny")
        with byte_llm() as llm, pytest.MonkeyPatch.context() as patch:
            service.use(llm)
            patch.setattr(llm, "restart", lambda: 1 / 0)
            await asyncio.to_thread(break_it, llm)
            await until(lambda: bool(caplog.records))
            assert service.status == "broken"
            assert service.num_restarts == 0

    asyncio.run(scenario())
    assert "ZeroDivisionError" in caplog.text
