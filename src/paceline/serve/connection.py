"""One connection: uvicorn's, with limits on how long a request's head is and takes, and on how long a client may take
nothing of its answer; and errors in JSON.

Source of the last: nginx's ``send_timeout``, which is between two writes and not for the whole answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.serve.errors import HTTPError, Problem
from paceline.serve.settings import ServeSettings
from paceline.serve.sse import json_bytes

CROWDED = "paceline.crowded"
"""Key of the scope of a request that came over a connection beyond ``max_connections``."""


class Connection(HttpToolsProtocol):
    """``settings`` is set by ``connections``, since uvicorn makes these itself."""

    settings: ClassVar[ServeSettings]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = self._in_message = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: Problem | None = None
        self._unsent_bytes = 0
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows it to Transport
        # Told of each byte that the client's system does not take at once: also of the last ones of an answer, which
        # would otherwise wait in a transport that is closing, for ever. The kernel buffers megabytes before that.
        self.transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.settings.max_connections:
            self.app = _Crowded(self.app)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head_timer()
        self._end_send_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._await_reader()

    def resume_writing(self) -> None:
        self._end_send_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        began_before = self._in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and began_before:
            # Counted here as well: the parser tells of a header only when all of it has come.
            self._head_bytes += len(data)
            if self._head_bytes > self.settings.max_header_bytes:
                self._refuse(self._too_long())
        elif not self._in_message and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # blank lines ended uvicorn's own timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = 0
        self._await_head()

    def on_headers_complete(self) -> None:
        self._end_head_timer()
        self._in_head = False
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self.settings.max_header_bytes:
            self._refusal = self._too_long()
            raise ValueError(self._refusal.message)  # ends the parser, and so comes to send_400_response
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP; also what this class refuses."""
        problem = self._refusal or HTTPError(400, "this is no valid HTTP/1.1 request", code="invalid_http").problem
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an answer is under way: nothing may come between its parts
            return
        body = json_bytes(problem.document())
        phrase = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}[problem.status]
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (problem.status, phrase, len(body), body)
        )
        self.transport.close()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.settings.header_s, self._head_is_late)

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._in_head:
            message = f"the request's head did not arrive within {self.settings.header_s:g} s"
            self._refuse(HTTPError(408, message, code="head_timeout").problem)
        elif not self._in_message:
            self.transport.close()

    def _await_reader(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.settings.send_s, self._reader_is_late)

    def _end_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _reader_is_late(self) -> None:
        """Ends the connection, and so the work for it, unless the client has taken something since."""
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._await_reader()
        else:
            self._send_timer = None
            self.transport.abort()

    def _refuse(self, problem: Problem) -> None:
        self._refusal = problem
        self.send_400_response(problem.message)

    def _too_long(self) -> Problem:
        message = f"the request's head is longer than {self.settings.max_header_bytes} bytes"
        return HTTPError(431, message, code="headers_too_large").problem


class _Crowded:
    """The application, told that there are too many connections."""

    def __init__(self, app: Any) -> None:
        self._app: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, CROWDED: True}, receive, send)


def connections(settings: ServeSettings) -> type[Connection]:
    """The class of a server's connections, as uvicorn takes it."""
    return type("Connection", (Connection,), {"settings": settings})
