"""An HTTP server in a thread of its own that answers as a test tells it, for clients under test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedServer:
    """Where it listens, and the bodies that it was sent."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def chat_chunk(content: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}]}


def usage_chunk(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return {"choices": [], "usage": counts}


def streamed(*pieces: bytes) -> Answer:
    """Answers every request with these bytes as an event stream."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


async def counted_words(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An answer of ``max_tokens`` tokens, one a chunk; a prompt has 2 tokens a word and 7 more."""
    text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    chunks = [event(chat_chunk(f"{at} ")) for at in range(body["max_tokens"])]
    usage = usage_chunk(7 + 2 * len(text.split()), body["max_tokens"])
    return await streamed(*chunks, event(chat_chunk("", "length")), event(usage), event(b"[DONE]"))(request, body)


def refused(status: int, body: Any, content_type: str = "application/json") -> Answer:
    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, content_type=content_type)

    return answer


@contextmanager
def scripted_server(answer: Answer, *, models: tuple[str, ...] = ("tiny",)) -> Iterator[ScriptedServer]:
    """Serves chat, completions and the list of models until the block ends."""
    server = ScriptedServer()

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        server.bodies.append(body)
        server.keys.append(request.headers.get("Authorization"))
        return await answer(request, body)

    async def list_models(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": name} for name in models]})

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        app.router.add_post("/v1/completions", handle)
        app.router.add_get("/v1/models", list_models)
        runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="scripted-server")
    thread.start()
    try:
        runner = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
        yield server
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
