"""`/openapi.json`: the table of endpoints as an OpenAPI document. Source: OpenAPI Specification 3.1.0."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request

from paceline import __version__
from paceline.serve.answers import Answer, DocumentAnswer
from paceline.serve.endpoints import Endpoint, openai_problem
from paceline.serve.errors import Problem
from paceline.serve.protocol.models import ErrorDocument, OpenAPIDocument
from paceline.serve.protocol.tgi import ErrorResponse
from paceline.serve.service import Exchange, Service

BODY_STATUSES = (400, 404, 408, 413, 415, 429, 504)
"""What may be wrong with a request that has a body, besides what may be wrong with any."""

KEY_SCHEME = "key"
RETRY_STATUSES = (429, 503)

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def openapi_endpoint(endpoints: Sequence[Endpoint], *, has_keys: bool) -> Endpoint:
    """The endpoint that describes ``endpoints`` and itself."""

    @functools.cache
    def document() -> dict[str, Any]:
        return openapi_document((*endpoints, endpoint), has_keys=has_keys)

    async def describe(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
        """This document."""
        return DocumentAnswer(document())

    endpoint = Endpoint("GET", "/openapi.json", describe, answer=OpenAPIDocument, is_open=True)
    return endpoint


def openapi_document(endpoints: Sequence[Endpoint], *, has_keys: bool) -> dict[str, Any]:
    """What the endpoints take and answer; ``has_keys`` says whether they ask for a key."""
    models: dict[type[BaseModel], None] = {ErrorDocument: None, ErrorResponse: None}
    for endpoint in endpoints:
        models.update((model, None) for model in (endpoint.body, endpoint.answer, endpoint.chunk) if model is not None)
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    components: dict[str, Any] = {"schemas": definitions["$defs"]}
    if has_keys:
        components["securitySchemes"] = {KEY_SCHEME: {"type": "http", "scheme": "bearer"}}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, has_keys=has_keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": components,
    }


def _operation(endpoint: Endpoint, *, has_keys: bool) -> dict[str, Any]:
    summary, _, description = (inspect.getdoc(endpoint.handler) or "").partition("\n\n")
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.method.lower()}_{re.sub(r'[^a-z_]+', '_', endpoint.path.lower()).strip('_')}",
        "summary": " ".join(summary.split()),
        "responses": _responses(endpoint, has_keys=has_keys),
    }
    if description:
        operation["description"] = description
    parameters = [match[1] for match in _PARAMETER.finditer(endpoint.path)]
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(endpoint.body)}}
    if has_keys and not endpoint.is_open:
        operation["security"] = [{KEY_SCHEME: []}]
    return operation


def _responses(endpoint: Endpoint, *, has_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        content["application/json"] = _schema(endpoint.answer)
    if endpoint.chunk is not None:
        # OpenAPI 3.1 cannot say that a body is a stream: the schema is that of what an event carries.
        content["text/event-stream"] = _schema(endpoint.chunk)
    if endpoint.media_type is not None:
        content[endpoint.media_type] = {"schema": {"type": "string"}}
    responses = {status: _response(status, content) for status in (200, *endpoint.other_statuses)}
    statuses = {500}
    if not endpoint.is_open:
        statuses |= {401, 503} if has_keys else {503}
    if endpoint.body is not None:
        statuses |= set(BODY_STATUSES)
    if "{" in endpoint.path:
        statuses.add(404)
    for status in statuses:
        problem = endpoint.problem(Problem(status, "", ""))
        model = ErrorDocument if endpoint.problem is openai_problem else ErrorResponse
        responses.setdefault(problem.status, _response(problem.status, {"application/json": _schema(model)}))
    return {str(status): responses[status] for status in sorted(responses)}


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if content:
        response["content"] = content
    if status in RETRY_STATUSES:
        response["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return response


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
