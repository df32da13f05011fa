"""The ASGI application: routes, keys, bodies, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.serve.answers import ClientLeftError
from paceline.serve.endpoints import ENDPOINTS, Endpoint
from paceline.serve.errors import HTTPError, problem_of
from paceline.serve.service import Exchange, Service
from paceline.serve.sse import EventResponse


def build_app(service: Service, endpoints: Sequence[Endpoint] = ENDPOINTS) -> Starlette:
    """The application over a service."""
    return Starlette(
        routes=[
            Route(endpoint.path, _Application(service, endpoint), methods=[endpoint.method]) for endpoint in endpoints
        ]
    )


class _Application:
    """One endpoint as an ASGI application."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        response = await self._respond(http)
        if response is not None:
            await response(scope, receive, send)

    async def _respond(self, http: Request) -> Response | EventResponse | None:
        endpoint, service = self._endpoint, self._service
        exchange = Exchange(endpoint=endpoint.path)
        try:
            if not endpoint.is_open:
                exchange.client = _client(service, http)
            body = None if endpoint.body is None else await _body(http, endpoint.body, service.settings.max_body_bytes)
            answer = await endpoint.handler(service, exchange, http, body)
            return answer.response()
        except (ClientLeftError, ClientDisconnect):
            return None
        except Exception as error:  # whatever it is, it ends this request alone
            return endpoint.problem(problem_of(error)).response()


def _client(service: Service, http: Request) -> Any:
    """Who asks; 401 for a key that nobody has."""
    scheme, _, key = http.headers.get("authorization", "").partition(" ")
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


async def _body(http: Request, model: type[BaseModel], max_bytes: int) -> BaseModel:
    """The parsed body; 413 when it is too long, 400 when it is not what the endpoint takes."""
    data = bytearray()
    async for piece in http.stream():
        data += piece
        if len(data) > max_bytes:
            raise HTTPError(413, f"the body is longer than {max_bytes} bytes", code="body_too_large")
    try:
        return model.model_validate(json.loads(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise HTTPError(400, f"{where}: {first['msg']}", param=where or None, code="invalid_value") from None
    except (ValueError, RecursionError) as error:
        raise HTTPError(400, f"the body is no JSON: {error}", code="invalid_json") from None
