"""Measures a server under a load: looks whether it answers, warms it up, sends the load, and sums up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import EndpointError, ParameterError
from paceline.measure.record import environment
from paceline.measure.serving.client import Client, Endpoint
from paceline.measure.serving.drive import Driver, Load, Report, Run, measure_sizing, probe
from paceline.measure.serving.exchange import LATENCIES
from paceline.measure.serving.figures import Limits, distribution_ms, figures, lateness_s
from paceline.measure.serving.jobs import Job, MadeUp, Sizing, made_up_job, made_up_jobs

DEFAULT_REQUESTS = 100
"""Of a load without a file, a number or a duration."""

_WARM_UP_TOKENS = 32
_WARM_UP_SEED = -2


@dataclass(frozen=True)
class ServingBenchmark:
    """A load on an endpoint.

    jobs           of a file; None makes up prompts of ``prompt_tokens`` tokens
    num_requests   None: each job of the file once, or until the duration is over
    source         what the document says of the jobs
    """

    endpoint: Endpoint
    load: Load
    jobs: Sequence[Job] | None = None
    prompt_tokens: int = 128
    num_requests: int | None = None
    num_warm_up: int = 1
    limits: Limits = field(default_factory=Limits)
    source: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.load.uses_trace and (self.jobs is None or any(job.at_s is None for job in self.jobs)):
            raise ParameterError("trace", True, "a --data file whose requests have times")

    @property
    def total(self) -> int | None:
        """Requests that are to be sent; None until the duration is over."""
        if self.load.uses_trace:
            assert self.jobs is not None
            return min(len(self.jobs), self.num_requests or len(self.jobs))
        if self.num_requests is not None or self.load.duration_s is not None:
            return self.num_requests
        return DEFAULT_REQUESTS if self.jobs is None else len(self.jobs)

    async def run(self, *, stopping: AbstractContextManager[asyncio.Event], report: Report) -> Outcome:
        """Measures. ``stopping`` is entered while the load runs, which its event ends early. Raises ``EndpointError``
        where the endpoint is none."""
        async with Client(self.endpoint) as named:
            endpoint = self.endpoint if self.endpoint.model else replace(self.endpoint, model=await _only_model(named))
        async with Client(endpoint) as client:
            is_made_up = self.jobs is None or any(isinstance(job.prompt, MadeUp) for job in self.jobs)
            sizing = await measure_sizing(client) if is_made_up else Sizing()
            warm_up = [made_up_job(_WARM_UP_SEED, index, _WARM_UP_TOKENS) for index in range(self.num_warm_up)]
            await probe(client, [job.sized(sizing) for job in warm_up])
            jobs = self._texts(sizing)
            with stopping as stop:
                run = await Driver(client, self.load, num_requests=self.total, stop=stop, report=report).run(jobs)
            return Outcome(replace(self, endpoint=endpoint), sizing, run)

    def _texts(self, sizing: Sizing) -> Iterator[Job]:
        """The jobs with their texts; those of a load that has an end are made before it starts."""
        jobs: Iterator[Job]
        if self.jobs is None:
            jobs = made_up_jobs(self.load.seed, self.prompt_tokens)
        else:
            jobs = iter(self.jobs) if self.load.uses_trace else itertools.cycle(self.jobs)
        sized = (job.sized(sizing) for job in jobs)
        return sized if self.total is None else iter(list(itertools.islice(sized, self.total)))


@dataclass(frozen=True)
class Outcome:
    """What a benchmark did, with the endpoint's model filled in."""

    benchmark: ServingBenchmark
    sizing: Sizing
    run: Run

    def document(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        benchmark, run = self.benchmark, self.run
        endpoint, load = benchmark.endpoint, benchmark.load
        return {
            "metric": "serving",
            "url": endpoint.base,
            "api": endpoint.api,
            "model": endpoint.model,
            "load": {
                "kind": "closed" if load.concurrency else "poisson" if load.rate else "trace",
                "concurrency": load.concurrency,
                "rate": load.rate,
                "duration_s": load.duration_s,
                "requests": benchmark.total,
                "seed": load.seed,
            },
            "data": {**benchmark.source, "tokens_per_word": self.sizing.tokens_per_word},
            "body": {"max_tokens": endpoint.max_tokens, **endpoint.fields},
            "stopped": run.stopped,
            **figures(run.exchanges, wall_s=run.wall_s, limits=benchmark.limits),
            "names": {key: latency.names for key, latency in LATENCIES.items()},
            "client": {
                "cpu_share": run.client_share,
                "resent": sum(one.num_resent for one in run.exchanges),
                "lateness_ms": distribution_ms(lateness_s(run.exchanges)) if load.concurrency is None else None,
            },
            "environment": environment(),
        }


async def _only_model(client: Client) -> str:
    names = await client.models()
    if len(names) != 1:
        problem = f"serves {len(names)} models ({', '.join(names[:8])}): name one with --model"
        raise EndpointError(client.endpoint.base, problem)
    return names[0]
