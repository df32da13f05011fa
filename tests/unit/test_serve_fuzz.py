"""Requests that schemathesis makes up from /openapi.json, right ones and wrong ones: what a server answers is described
there, and never an error of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest
import schemathesis.openapi
from byte_llm import byte_llm
from hypothesis import HealthCheck, Phase, given, settings
from live_server import LIMIT_S, LiveServer, eventually, is_idle, live_server
from schemathesis import Case, GenerationMode

from paceline.serve.endpoints import ENDPOINTS
from paceline.serve.settings import ServeSettings

NUM_EXAMPLES = 6
"""Of each kind for each endpoint with a body: hundreds belong to the command line, see docs/LOG.md."""

WITH_BODY = sorted({endpoint.path for endpoint in ENDPOINTS if endpoint.body is not None})
WITHOUT = sorted({endpoint.path.replace(":path", "") for endpoint in ENDPOINTS if endpoint.body is None})


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(byte_llm(text="hello\0", context_length=256), ServeSettings(request_timeout_s=10.0)) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    return server.get("/openapi.json").json()


@dataclass(frozen=True)
class Heard:
    """What the server said to a request."""

    path: str
    method: str
    status: int
    media_type: str
    text: str


def judge(document: dict[str, Any], heard: Heard) -> None:
    """Fails where the document does not say that this may be the answer, or where it is the server's fault."""
    assert heard.status < 500, heard
    described = document["paths"][heard.path][heard.method]["responses"]
    assert str(heard.status) in described, heard
    content = described[str(heard.status)].get("content")
    if content is None:
        assert not heard.text
        return
    assert heard.media_type in content
    schema = {**content[heard.media_type]["schema"], "components": document["components"]}
    found: list[Any] = [heard.text]
    if heard.media_type == "application/json":
        found = [json.loads(heard.text)]
    elif heard.media_type == "text/event-stream":
        found = [json.loads(data) for data in data_of(heard.text) if data != "[DONE]"]
    for value in found:
        jsonschema.Draft202012Validator(schema).validate(value)


def data_of(events: str) -> list[str]:
    return [line.removeprefix("data:").strip() for line in events.splitlines() if line.startswith("data:")]


def fuzz(server: LiveServer, document: dict[str, Any], path: str, method: str, mode: GenerationMode) -> list[int]:
    """Asks one endpoint many things; the statuses."""
    operation = schemathesis.openapi.from_dict(document)[path][method]
    statuses: list[int] = []

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # making a failure smaller takes a minute
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        response = case.call(base_url=server.url, timeout=LIMIT_S)
        media_type = response.headers.get("content-type", [""])[0].partition(";")[0]
        judge(document, Heard(path, method.lower(), response.status_code, media_type, response.text))
        statuses.append(response.status_code)

    ask()
    return statuses


@pytest.mark.parametrize("path", WITH_BODY)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_bodies(server: LiveServer, document: dict[str, Any], path: str, mode: GenerationMode) -> None:
    statuses = fuzz(server, document, path, "POST", mode)
    assert len(statuses) >= NUM_EXAMPLES // 2
    assert mode is GenerationMode.POSITIVE or min(statuses) >= 400, "what the document does not allow was taken"
    assert eventually(lambda: is_idle(server)), "a request is left over"


@pytest.mark.parametrize("path", WITHOUT)
def test_paths(server: LiveServer, document: dict[str, Any], path: str) -> None:
    assert fuzz(server, document, path, "GET", GenerationMode.POSITIVE)


def test_the_judge_sees_what_is_wrong(document: dict[str, Any]) -> None:
    right = Heard("/detokenize", "post", 200, "application/json", '{"prompt": "hi"}')
    judge(document, right)
    events = Heard("/generate_stream", "post", 200, "text/event-stream", 'data: {"index": "one"}\n\n')
    for wrong in (
        replace(right, status=500),
        replace(right, status=418),
        replace(right, media_type="text/plain"),
        replace(right, text="{}"),
        replace(right, text='{"prompt": 5}'),
        replace(right, status=400),
        events,
    ):
        with pytest.raises((AssertionError, jsonschema.ValidationError)):
            judge(document, wrong)
