"""Sends the requests of a load: so many at a time, at random times, or at those of a trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import EndpointError, ParameterError
from paceline.measure.serving.client import LOST_CONNECTION, Client
from paceline.measure.serving.exchange import Exchange
from paceline.measure.serving.jobs import Job, Sizing, made_up_job, poisson_times

MOST_LOST = 20
"""So many requests in a row that find no server end the run: it has gone, and the rest would say the same."""

_PROBE_WORDS = (32, 288)
_PROBE_SEED = -1
"""Not a seed that a load has: what probes leave in a prefix cache serves no request of it."""


class Report(Protocol):
    """Is told how many requests have ended, of how many."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


@dataclass(frozen=True)
class Load:
    """Exactly one of: ``concurrency`` requests at a time (closed loop), ``rate`` a second on average at random times
    (open loop), or the times of the jobs (``uses_trace``). No request is sent after ``duration_s``; those that run
    then are waited for."""

    concurrency: int | None = None
    rate: float | None = None
    uses_trace: bool = False
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if sum((self.concurrency is not None, self.rate is not None, self.uses_trace)) != 1:
            raise ParameterError("load", self, "one of concurrency, rate and the times of a trace")
        if self.concurrency is not None and self.concurrency < 1:
            raise ParameterError("concurrency", self.concurrency, "1 or more requests at a time")
        for name in ("rate", "duration_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ParameterError(name, value, "a number above 0")


@dataclass
class Run:
    """What was sent and when it ended, by the client's clock.

    cpu_s      seconds of processor time that the client used meanwhile
    stopped    why it ended early, None where it did not
    """

    started_s: float
    ended_s: float
    exchanges: list[Exchange] = field(default_factory=list)
    cpu_s: float = 0.0
    stopped: str | None = None

    @property
    def wall_s(self) -> float:
        """From the start of the load to its last answer."""
        return self.ended_s - self.started_s

    @property
    def client_share(self) -> float:
        """How much of one core the client used: near 1, the figures are the client's own."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0


class Driver:
    """Runs one load on one client. ``stop`` ends it early: requests under way are dropped and count as unfinished."""

    def __init__(
        self, client: Client, load: Load, *, num_requests: int | None, stop: asyncio.Event, report: Report
    ) -> None:
        self._client = client
        self._load = load
        self._num_requests = num_requests
        self._stop = stop
        self._report = report
        self._num_ended = 0
        self._lost_in_a_row = 0
        self._run = Run(client.clock(), client.clock())

    async def run(self, jobs: Iterator[Job]) -> Run:
        """Sends the jobs, which have texts, and returns when the last one has ended."""
        run, cpu_s = self._run, time.process_time()
        run.started_s = self._client.clock()
        loop = self._closed_loop(jobs) if self._load.concurrency is not None else self._open_loop(jobs)
        sending = asyncio.ensure_future(loop)
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, stopping):
            if not task.done():
                task.cancel()
        await asyncio.gather(sending, stopping, return_exceptions=True)
        run.ended_s = self._client.clock()
        run.cpu_s = time.process_time() - cpu_s
        if not sending.cancelled():
            sending.result()  # raises what went wrong here
        if self._stop.is_set() and run.stopped is None:
            run.stopped = "interrupted"
        return run

    async def _closed_loop(self, jobs: Iterator[Job]) -> None:
        async def client() -> None:
            for job in jobs:
                if self._is_over(self._client.clock() - self._run.started_s):
                    return
                await self._ask(job, None)

        assert self._load.concurrency is not None
        tasks = [asyncio.ensure_future(client()) for _ in range(self._load.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def _open_loop(self, jobs: Iterator[Job]) -> None:
        clock, started_s = self._client.clock, self._run.started_s
        tasks: list[asyncio.Task[None]] = []
        try:
            for at_s, job in self._arrivals(jobs):
                if self._is_over(at_s):
                    break
                due_s = started_s + at_s
                if (early_s := due_s - clock()) > 0:
                    await asyncio.sleep(early_s)
                tasks.append(asyncio.ensure_future(self._ask(job, due_s)))
            await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    def _is_over(self, at_s: float) -> bool:
        """Whether a request that comes so long after the start is no longer sent."""
        return self._stop.is_set() or (self._load.duration_s is not None and at_s >= self._load.duration_s)

    def _arrivals(self, jobs: Iterator[Job]) -> Iterator[tuple[float, Job]]:
        if self._load.rate is not None:
            yield from zip(poisson_times(self._load.rate, self._load.seed), jobs, strict=False)
            return
        for job in jobs:
            assert job.at_s is not None, "who asks for the times of a trace has seen that it has some"
            yield job.at_s, job

    async def _ask(self, job: Job, due_s: float | None) -> None:
        exchange = Exchange(self._client.clock(), due_s)
        self._run.exchanges.append(exchange)
        await self._client.ask(job, exchange)
        self._num_ended += 1
        is_lost = exchange.failure is not None and exchange.failure.kind in LOST_CONNECTION
        self._lost_in_a_row = self._lost_in_a_row + 1 if is_lost else 0
        if self._lost_in_a_row == MOST_LOST:
            self._run.stopped = f"the server has gone: {MOST_LOST} requests in a row found none"
            self._stop.set()
        self._report(self._num_ended, self._num_requests)


async def probe(client: Client, jobs: list[Job]) -> None:
    """Answers the jobs one after the other, outside of any load; raises ``EndpointError`` where one fails."""
    for job in jobs:
        await _answered(client, job)


async def measure_sizing(client: Client) -> Sizing:
    """How many tokens a word is and what the server's template adds, from two prompts; the plainest guess where the
    server does not count. Raises ``EndpointError``."""
    points = []
    for words in _PROBE_WORDS:
        job = Job(made_up_job(_PROBE_SEED, words, words).sized(Sizing()).prompt, max_tokens=1)
        exchange = await _answered(client, job)
        if exchange.prompt_tokens is None:
            return Sizing()
        points.append((words, exchange.prompt_tokens))
    return Sizing.between(*points)


async def _answered(client: Client, job: Job) -> Exchange:
    exchange = Exchange(client.clock())
    await client.ask(job, exchange)
    if exchange.failure is not None:
        raise EndpointError(client.endpoint.target, f"{exchange.failure.kind}: {exchange.failure.message}")
    return exchange


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
