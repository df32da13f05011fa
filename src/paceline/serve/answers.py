"""What a handler returns: a document, text, or a stream of events; and waiting that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.serve.sse import EventResponse, json_bytes

_T = TypeVar("_T")


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class DocumentAnswer:
    """JSON."""

    document: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        """As Starlette sends it."""
        return Response(json_bytes(self.document), self.status, self.headers, "application/json")


@dataclass(frozen=True)
class TextAnswer:
    """Text of some media type."""

    text: str
    media_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        """As Starlette sends it."""
        return Response(self.text, self.status, self.headers, self.media_type)


@dataclass(frozen=True)
class EventAnswer:
    """Server-sent events. Closing the iterator, which also happens when the client leaves, must end its work."""

    events: AsyncIterator[bytes]

    def response(self) -> EventResponse:
        """As an ASGI application."""
        return EventResponse(self.events)


Answer = DocumentAnswer | TextAnswer | EventAnswer


async def until_disconnected(http: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What ``work`` returns; ``ClientLeftError`` and an end to the work when the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
