"""The ASGI application: routes, keys, who is turned away, errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import OverloadError
from paceline.serve.answers import ClientLeftError
from paceline.serve.bodies import read_body
from paceline.serve.connection import CROWDED
from paceline.serve.endpoints import ENDPOINTS, Endpoint, openai_problem
from paceline.serve.errors import INTERNAL_ERROR, HTTPError, Problem, drain_s, problem_of
from paceline.serve.keys import Client
from paceline.serve.openapi import openapi_endpoint
from paceline.serve.service import Exchange, Service
from paceline.serve.sse import EventResponse, event

log = logging.getLogger("paceline.serve")

LAST_WORDS_S = 1.0
"""Time that a client gets to take the error that ends its stream."""

_SANE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def build_app(service: Service, endpoints: Sequence[Endpoint] = ENDPOINTS) -> ASGIApp:
    """The application over a service."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in (*endpoints, openapi_endpoint(endpoints, has_keys=not service.keys.is_open)):
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    routes = [Route(path, _Path(service, path, methods)) for path, methods in paths.items()]
    app: ASGIApp = Router(routes, redirect_slashes=False, default=_Path(service, "", {}))
    if service.settings.allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=service.settings.allow_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return app


class _Path:
    """All methods of one path as an ASGI application; without any, what answers paths that do not exist."""

    def __init__(self, service: Service, path: str, methods: dict[str, Endpoint]) -> None:
        self._service = service
        self._path = path
        self._methods = methods
        self._allowed = ", ".join(sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a web socket
            return
        http = Request(scope, receive)
        endpoint = self._methods.get("GET" if http.method == "HEAD" else http.method)
        exchange = Exchange(endpoint=self._path, method=http.method)
        exchange.traceparent, exchange.tracestate = map(http.headers.get, ("traceparent", "tracestate"))
        exchange.request_id = _request_id(http.headers) or exchange.request_id
        reply = _Reply(send, exchange.request_id, lambda: self._service.watches.sent(exchange))
        try:
            response = await self._response(endpoint, exchange, http)
            await response(scope, receive, reply)
        except (ClientLeftError, ClientDisconnect):
            pass
        except asyncio.CancelledError:
            if not self._service.is_ending:
                raise
            exchange.problem = _stopping().problem.code
            await self._end(endpoint, scope, receive, reply)
        except Exception as error:  # whatever it is, it ends this request alone
            problem = self._problem(error, exchange)
            if not reply.is_started:
                await _answer(endpoint, problem)(scope, receive, reply)
            else:
                await reply.end(event(_problem_document(endpoint, problem), "error"))
        finally:
            self._service.watches.ended(exchange, reply.status, is_complete=reply.is_complete)

    async def _response(self, endpoint: Endpoint | None, exchange: Exchange, http: Request) -> Response | EventResponse:
        service = self._service
        if endpoint is None:
            if http.method == "OPTIONS" and self._methods:
                return Response(None, 204, {"Allow": self._allowed})
            raise self._no_such(http)
        if not endpoint.is_open:
            if http.scope.get(CROWDED):
                raise _unavailable("too many connections are open", "too_many_connections")
            if service.is_stopping:
                raise _stopping()
            exchange.client = _client(service, http.headers)
        body = None if endpoint.body is None else await read_body(http, endpoint.body, service.settings)
        answer = await endpoint.handler(service, exchange, http, body)
        return answer.response()

    def _no_such(self, http: Request) -> HTTPError:
        if not self._methods:
            return HTTPError(404, f"there is nothing at {http.url.path[:200]!r}", code="not_found")
        message = f"{http.method[:20]} is not possible here, only {self._allowed}"
        return HTTPError(405, message, code="method_not_allowed", headers={"Allow": self._allowed})

    def _problem(self, error: Exception, exchange: Exchange) -> Problem:
        """What the client is told; what it cannot have caused is logged."""
        problem = problem_of(error)
        exchange.problem = problem.code or problem.kind
        if problem.code == INTERNAL_ERROR:
            log.error("request %s failed", exchange.request_id, exc_info=error)
            message = f"{problem.message}: the server's log tells more about request {exchange.request_id}"
            return Problem(problem.status, message, problem.kind, code=problem.code)
        if isinstance(error, OverloadError):
            seconds = drain_s(self._service.llm.stats(), error.num_waiting)
            headers = {**problem.headers, "Retry-After": str(seconds)}
            return Problem(problem.status, problem.message, problem.kind, code=problem.code, headers=headers)
        return problem

    async def _end(self, endpoint: Endpoint | None, scope: Scope, receive: Receive, reply: _Reply) -> None:
        """The server stops and has waited long enough: says so to whoever still waits."""
        problem = _stopping().problem
        if not reply.is_started:
            await _answer(endpoint, problem)(scope, receive, reply)
        else:
            await reply.end(event(_problem_document(endpoint, problem), "error"))


class _Reply:
    """Sends a response, with the request's id in its head, tells ``on_sent`` and knows how far it is."""

    def __init__(self, send: Send, request_id: str, on_sent: Callable[[], object]) -> None:
        self._send = send
        self._on_sent = on_sent
        self._headers = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
        self.status = 0
        self.is_complete = False

    @property
    def is_started(self) -> bool:
        """Whether a status has gone out."""
        return self.status > 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        elif message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)
        await self._send(message)
        self._on_sent()

    async def end(self, data: bytes) -> None:
        """Sends the last bytes of a stream, unless the client does not take them in time."""
        if not self.is_complete:
            sending = self({"type": "http.response.body", "body": data, "more_body": False})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(sending, LAST_WORDS_S)


def _answer(endpoint: Endpoint | None, problem: Problem) -> Response:
    return (openai_problem if endpoint is None else endpoint.problem)(problem).response()


def _problem_document(endpoint: Endpoint | None, problem: Problem) -> object:
    return (openai_problem if endpoint is None else endpoint.problem)(problem).document


def _client(service: Service, headers: Headers) -> Client:
    """Who asks; 401 for a key that nobody has."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    client = service.keys.client_of(key.strip() if scheme.lower() == "bearer" else None)
    if client is None:
        raise HTTPError(
            401,
            "no such API key: send `Authorization: Bearer KEY`",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return client


def _request_id(headers: Headers) -> str | None:
    """The client's own name for its request, where that can stand in a header and a log."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else None


def _stopping() -> HTTPError:
    return _unavailable("the server is about to stop", "server_stopping")


def _unavailable(message: str, code: str) -> HTTPError:
    headers = {"Retry-After": "1", "Connection": "close"}
    return HTTPError(503, message, kind="server_error", code=code, headers=headers)
