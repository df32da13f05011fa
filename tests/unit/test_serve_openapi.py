"""The OpenAPI document says what the server does: its paths, and what a running one answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from byte_llm import byte_llm
from live_server import MESSAGES, LiveServer, live_server

from paceline.serve.endpoints import ENDPOINTS
from paceline.serve.keys import KeyRing

PROMPT = {"prompt": "hi", "max_tokens": 4}
TEXT_INPUT = {"inputs": "hi", "parameters": {"max_new_tokens": 4, "details": True, "top_n_tokens": 2}}
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("get", "/v1/models", None),
    ("get", "/v1/models/bytes", None),
    ("get", "/v1/models/other", None),
    ("get", "/tokenizer_info", None),
    ("get", "/info", None),
    ("get", "/metrics", None),
    ("get", "/stats", None),
    ("get", "/", None),
    ("get", "/health", None),
    ("get", "/health/live", None),
    ("get", "/health/ready", None),
    ("get", "/openapi.json", None),
    ("post", "/v1/chat/completions", {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("post", "/v1/chat/completions", {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
    ("post", "/v1/chat/completions", {"messages": MESSAGES, "stream": True, "logprobs": True, "top_logprobs": 1}),
    ("post", "/v1/chat/completions", {"messages": MESSAGES, "model": "other"}),
    ("post", "/v1/chat/completions", {"messages": 5}),
    ("post", "/v1/completions", {**PROMPT, "echo": True, "logprobs": 2}),
    ("post", "/v1/completions", {**PROMPT, "stream": True, "logprobs": 1}),
    ("post", "/v1/completions", {**PROMPT, "suffix": "x"}),
    ("post", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("post", "/detokenize", {"tokens": [104, 105]}),
    ("post", "/detokenize", {"tokens": [-1]}),
    ("post", "/generate", TEXT_INPUT),
    ("post", "/generate", {"inputs": "hi", "parameters": {"watermark": True}}),
    ("post", "/generate_stream", TEXT_INPUT),
    ("post", "/", {"inputs": "hi", "parameters": {"max_new_tokens": 2}}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(byte_llm(text="hello\0")) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    return server.get("/openapi.json").json()


def closed(schema: Any) -> Any:
    """The schema, but of an object with named properties it takes no others."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        inner.setdefault("additionalProperties", False)
    return inner


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raises ValidationError where ``value`` is not what ``schema`` says, or more."""
    components = closed(document["components"])
    jsonschema.Draft202012Validator({**schema, "components": components}).validate(value)


def test_every_route_is_in_it_and_nothing_else(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    routes = {(endpoint.method, endpoint.path.replace(":path", "")) for endpoint in ENDPOINTS}
    assert described == routes | {("GET", "/openapi.json")}


def test_names_are_unique_and_references_lead_somewhere(document: dict[str, Any]) -> None:
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(operation["summary"] for operation in operations)
    text = json.dumps(document)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.partition('"')[0] in document["components"]["schemas"]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_what_a_running_server_answers_is_what_it_says(
    server: LiveServer, document: dict[str, Any], method: str, path: str, body: dict[str, Any] | None
) -> None:
    answer = server.get(path) if method == "get" else server.post(path, json=body)
    described = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    response = document["paths"][described][method]["responses"][str(answer.status_code)]
    if not answer.content:
        assert "content" not in response
        return
    media_type = answer.headers["content-type"].partition(";")[0]
    schema = response["content"][media_type]["schema"]
    if media_type in ("text/plain", "text/html"):
        return
    if media_type != "text/event-stream":
        check(document, schema, answer.json())
        return
    events = [line.removeprefix("data:").strip() for line in answer.text.splitlines() if line.startswith("data:")]
    assert events
    for event in events:
        if event != "[DONE]":
            check(document, schema, json.loads(event))


def test_the_checker_sees_what_is_wrong(document: dict[str, Any]) -> None:
    schema = {"$ref": "#/components/schemas/Health"}
    check(document, schema, {"status": "ready"})
    for wrong in ({}, {"status": 5}, {"status": "ready", "more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check(document, schema, wrong)


def test_keys_are_in_it_when_they_are_asked_for() -> None:
    with live_server(byte_llm(), keys=KeyRing({"a": "secret"})) as server:
        document = server.get("/openapi.json").json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["security"] == [{"key": []}]
    assert "401" in chat["responses"]
    assert "security" not in document["paths"]["/health/live"]["get"]
