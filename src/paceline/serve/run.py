"""Runs a server: loads the model while the port already answers, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from starlette.applications import Starlette

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
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises what ``load`` raises."""
    keys = read_keys(settings.api_key_file) if settings.api_key_file is not None else KeyRing({})
    service = Service(settings, keys, model=model)
    return asyncio.run(_serve(service, load))


async def _serve(service: Service, load: Callable[[], LLM]) -> int:
    settings = service.settings
    app: Starlette = build_app(service)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=int(settings.shutdown_s),
    )
    server = _Server(config)
    async with _loaded(service, load, server):
        await server.serve()
    return 0


@contextlib.asynccontextmanager
async def _loaded(service: Service, load: Callable[[], LLM], server: uvicorn.Server) -> AsyncIterator[None]:
    """Loads the model beside what happens inside; closes it afterwards. A load that fails stops the server."""

    async def loading() -> None:
        try:
            llm = await asyncio.to_thread(load)
        except BaseException:
            server.should_exit = True
            raise
        service.use(llm)
        address = f"http://{service.settings.host}:{service.settings.port}"
        print(f"Paceline serves {service.model} at {address}", file=sys.stderr, flush=True)

    task = asyncio.ensure_future(loading())
    try:
        yield
    finally:
        service.is_stopping = True
        await task
        if service.is_loaded:
            await asyncio.to_thread(service.llm.close)
