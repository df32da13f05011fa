"""Runs a server: loads the model while the port already answers, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from paceline.errors import AddressError
from paceline.llm import LLM
from paceline.serve.app import build_app
from paceline.serve.keys import KeyRing, read_keys
from paceline.serve.service import Service
from paceline.serve.settings import ServeSettings


class _Server(uvicorn.Server):
    """uvicorn, but a signal that was obeyed is not raised once more: the exit status is 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def serve(model: str, settings: ServeSettings, load: Callable[[], LLM]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises ``AddressError`` where it cannot listen, and what
    ``load`` raises."""
    keys = read_keys(settings.api_key_file) if settings.api_key_file is not None else KeyRing({})
    service = Service(settings, keys, model=model)
    with listen(settings.host, settings.port) as listener:
        return asyncio.run(_serve(service, load, listener))


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections there; raises ``AddressError``, before a model has been loaded in vain."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(host, port, str(error)) from error
    except OSError as error:
        raise AddressError(host, port, os.strerror(error.errno or 0)) from error


def url_of(listener: socket.socket) -> str:
    """The address that a socket really has; port 0 has become a number."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(service: Service, load: Callable[[], LLM], listener: socket.socket) -> int:
    settings = service.settings
    app: Starlette = build_app(service)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=int(settings.shutdown_s),
    )
    server = _Server(config)
    async with _loaded(service, load, server, url_of(listener)):
        await server.serve(sockets=[listener])
    return 0


@contextlib.asynccontextmanager
async def _loaded(service: Service, load: Callable[[], LLM], server: uvicorn.Server, url: str) -> AsyncIterator[None]:
    """Loads the model beside what happens inside; closes it afterwards. A load that fails stops the server."""

    async def loading() -> None:
        try:
            llm = await asyncio.to_thread(load)
        except BaseException:
            server.should_exit = True
            raise
        service.use(llm)
        print(
            f"Paceline serves {service.model} at {url} (ready in {_process_age_s():.1f} s)", file=sys.stderr, flush=True
        )

    task = asyncio.ensure_future(loading())
    try:
        yield
    finally:
        service.is_stopping = True
        await task
        if service.is_loaded:
            await asyncio.to_thread(service.llm.close)


def _process_age_s() -> float:
    """Seconds since the process began, imports included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
