"""Runs a server: the port answers while the model still loads, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path

import uvicorn

from paceline.errors import UnsupportedError
from paceline.llm import LLM
from paceline.serve.address import url_of
from paceline.serve.app import build_app
from paceline.serve.bandwidth import Bandwidth
from paceline.serve.connection import connections
from paceline.serve.endpoints import ENDPOINTS
from paceline.serve.keys import KeyRing, read_keys
from paceline.serve.logs import RequestLog, logging_to
from paceline.serve.service import Service
from paceline.serve.settings import ServeSettings
from paceline.serve.signals import SIGNALS, leave

ENDING_S = 5.0
"""Time that requests get to end once they are cancelled."""

STANDARD_ERROR = 2

_POLL_S = 0.05


def serve(model: str, settings: ServeSettings, listener: socket.socket, loading: Future[LLM]) -> int:
    """Serves on ``listener`` until SIGTERM or SIGINT, from when ``loading`` is done; returns the exit status. Raises
    what ``loading`` raises."""
    keys = read_keys(settings.api_key_file) if settings.api_key_file is not None else KeyRing({})
    service = Service(settings, keys, model=model)
    service.bandwidth = Bandwidth()
    _raise_file_limit()
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with logging_to(STANDARD_ERROR, settings.log_format) as logger:
        if settings.log_format != "off":
            service.watches.add(RequestLog(logger))
        with _spans(service, logger):
            _spare_first_request()
            return asyncio.run(_serve(Server(service), listener, loading))


def _spare_first_request() -> None:
    """Does what the first request would wait for (40 ms) now, while the model loads and is measured without the
    interpreter's lock."""
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            endpoint.body.model_rebuild()
    for name in ("jinja2.ext", "jinja2.sandbox"):  # what chat templates are compiled with
        import_module(name)


@contextlib.contextmanager
def _spans(service: Service, logger: logging.Logger) -> Iterator[None]:
    """Has requests become spans while this lasts, where that is asked for."""
    if not service.settings.otel:
        yield
        return
    try:  # takes 0.3 s, and most do without
        from paceline.serve.tracing import span_exporter, tracing
    except ImportError as error:
        raise UnsupportedError(f"{error}: install what spans need with `pip install paceline[otel]`") from error
    with tracing(service.model, logger, span_exporter()) as watch:
        service.watches.add(watch)
        yield


async def _serve(server: Server, listener: socket.socket, loading: Future[LLM]) -> int:
    service = server.service

    async def become_ready() -> None:
        try:
            service.use(await asyncio.wrap_future(loading))
        finally:
            server.should_exit = not service.is_loaded
        # What was loaded stays: no collection need look at it again.
        gc.collect()
        gc.freeze()
        ready = f"(ready in {_process_age_s():.1f} s)"
        print(f"Paceline serves {service.model} at {url_of(listener)} {ready}", file=sys.stderr, flush=True)

    getting_ready = asyncio.ensure_future(become_ready())
    await server.serve(sockets=[listener])
    await getting_ready
    await asyncio.to_thread(service.llm.close)
    gc.unfreeze()  # or native objects in cycles would count as leaked
    return 0


class Server(uvicorn.Server):
    """uvicorn's, which stops as is fit for answers that take long.

    On a signal it takes no more connections, answers new requests 503, and ends when those that run have. After
    ``shutdown_s`` they are cancelled, which tells their clients. A second signal, and one while the model loads, end
    the process at once.
    """

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            build_app(service),
            http=connections(service.settings),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what is no HTTP is no news
            access_log=False,
            server_header=False,
        )
        super().__init__(config)
        self.service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, signal.SIG_DFL)  # the loop takes only what nobody else has taken
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        if self.should_exit or not self.service.is_loaded:
            leave()
        self.should_exit = self.service.is_stopping = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once ``should_exit`` is seen."""
        for listening in self.servers:
            listening.close()
        if not await self._have_ended(self.service.settings.shutdown_s):
            self.service.is_ending = True
            for task in self.server_state.tasks:
                task.cancel()
            await self._have_ended(ENDING_S)
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def _have_ended(self, limit_s: float) -> bool:
        """Whether all requests end in that time."""
        deadline_s = time.monotonic() + limit_s
        while self.server_state.tasks and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return not self.server_state.tasks


def _raise_file_limit() -> None:
    """A connection is a file, and many systems let a process have a thousand unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _process_age_s() -> float:
    """Seconds since the process began, imports included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
