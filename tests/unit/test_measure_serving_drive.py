"""Closed and open loops, over a client of a scripted clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import ParameterError
from paceline.measure.serving.drive import MOST_LOST, Driver, Load, Run
from paceline.measure.serving.exchange import Exchange, Failure
from paceline.measure.serving.figures import Limits, figures, lateness_s
from paceline.measure.serving.jobs import Job


class ScriptedClient:
    """Answers when told to; its clock stands still but for what the test adds."""

    def __init__(self, end: Callable[[int, Exchange], None] | None = None) -> None:
        self.now_s = 100.0
        self.sent: list[Job] = []
        self.running = 0
        self.most_running = 0
        self._end = end

    def clock(self) -> float:
        return self.now_s

    async def ask(self, job: Job, exchange: Exchange) -> None:
        exchange.sent_s = self.now_s
        self.sent.append(job)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        at = len(self.sent) - 1
        await asyncio.sleep(0)
        self.running -= 1
        self.now_s += 1.0
        exchange.chunk_s = [self.now_s]
        exchange.is_complete = True
        if self._end is not None:
            self._end(at, exchange)


def driven(client: Any, load: Load, jobs: list[Job], stop: asyncio.Event | None = None) -> Run:
    async def drive() -> Run:
        event = asyncio.Event() if stop is None else stop
        return await Driver(client, load, num_requests=len(jobs), stop=event, report=lambda *_: None).run(iter(jobs))

    return asyncio.run(drive())


JOBS = [Job(f"prompt {at}") for at in range(10)]


def test_a_closed_loop_keeps_so_many_running() -> None:
    client = ScriptedClient()
    run = driven(client, Load(concurrency=3), JOBS)
    assert client.most_running == 3
    assert client.sent == JOBS
    assert len(run.exchanges) == 10
    assert run.stopped is None
    assert run.wall_s == pytest.approx(10.0)


def test_no_request_is_sent_after_the_duration() -> None:
    client = ScriptedClient()
    run = driven(client, Load(concurrency=1, duration_s=4.0), JOBS)
    assert len(run.exchanges) == 4
    assert all(one.succeeded for one in run.exchanges)


def test_a_trace_is_sent_at_its_times_whether_or_not_answers_come() -> None:
    jobs = [Job(f"{at}", at_s=at) for at in (0.0, 0.0, 0.0, -5.0)]
    client = ScriptedClient()
    run = driven(client, Load(uses_trace=True), jobs)
    assert client.most_running == 4, "an open loop does not wait for answers"
    assert lateness_s(run.exchanges) == [0.0, 0.0, 0.0, 5.0]


def test_an_open_loop_ends_with_the_duration() -> None:
    jobs = [Job(f"{at}", at_s=at) for at in (0.0, -1.0, 7.0, 8.0)]
    assert len(driven(ScriptedClient(), Load(uses_trace=True, duration_s=5.0), jobs).exchanges) == 2


def test_a_server_that_has_gone_ends_the_run() -> None:
    def fail(at: int, exchange: Exchange) -> None:
        if at >= 5:
            exchange.failure = Failure("connection_failed", "refused")

    run = driven(ScriptedClient(fail), Load(concurrency=1), JOBS * 10)
    assert len(run.exchanges) == 5 + MOST_LOST
    assert run.stopped is not None
    assert "has gone" in run.stopped


def test_requests_that_fail_otherwise_do_not_end_the_run() -> None:
    def fail(at: int, exchange: Exchange) -> None:
        exchange.failure = Failure("http_429", "full")

    run = driven(ScriptedClient(fail), Load(concurrency=2), JOBS * 10)
    assert len(run.exchanges) == 100
    assert run.stopped is None


@pytest.mark.parametrize("load", [Load(concurrency=2), Load(rate=1e9)])
def test_an_interrupted_run_keeps_what_it_has(load: Load) -> None:
    async def drive() -> Run:
        stop = asyncio.Event()

        class Hanging(ScriptedClient):
            async def ask(self, job: Job, exchange: Exchange) -> None:
                if len(self.sent) == 3:
                    stop.set()
                    await asyncio.Event().wait()
                await super().ask(job, exchange)

        client: Any = Hanging()
        return await Driver(client, load, num_requests=10, stop=stop, report=lambda *_: None).run(iter(JOBS))

    run = asyncio.run(drive())
    assert run.stopped == "interrupted"
    assert sum(one.succeeded for one in run.exchanges) == 3
    assert figures(run.exchanges, wall_s=1.0, limits=Limits())["requests"]["unfinished"] >= 1


def test_a_fault_of_ours_is_not_hidden() -> None:
    def fail(at: int, exchange: Exchange) -> None:
        raise ZeroDivisionError

    for load in (Load(concurrency=2), Load(rate=1e9)):
        with pytest.raises(ZeroDivisionError):
            driven(ScriptedClient(fail), load, JOBS)


def test_a_load_is_one_of_three() -> None:
    for fields in ({}, {"concurrency": 1, "rate": 1.0}, {"rate": 0.0}, {"concurrency": 0}, {"rate": math.nan}):
        with pytest.raises(ParameterError):
            Load(**fields)  # type: ignore[arg-type]
