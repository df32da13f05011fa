"""Structured output as OpenAI's own client asks for it: a real server, the real SmolLM2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel
from server_process import ServerProcess

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Describe the city of Seoul."}]


class City(BaseModel):
    country: Literal["Korea", "Japan", "China"]
    is_capital: bool
    river_length_km: int


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
        yield made


def test_a_pydantic_model_comes_back(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = client.chat.completions.parse(
        model=server.model, messages=MESSAGES, response_format=City, temperature=0.8, seed=1, max_tokens=120
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, City)


def test_any_object_and_a_stream(client: openai.OpenAI, server: ServerProcess) -> None:
    chunks = client.chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}},
        stream=True,
        temperature=0.8,
        seed=1,  # unseeded, a name may go on until it is cut
        max_tokens=120,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    City.model_validate(json.loads(text))
    answer = client.chat.completions.create(
        model=server.model, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=20
    )
    assert (answer.choices[0].message.content or "").startswith("{")


def test_extensions(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = client.completions.create(
        model=server.model, prompt="The capital of Korea is", extra_body={"guided_choice": ["Seoul", "Busan", "Paris"]}
    )
    assert answer.choices[0].text in ("Seoul", "Busan", "Paris")


def test_a_schema_that_cannot_hold_is_a_bad_request(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(
            model=server.model,
            messages=MESSAGES,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
            },
        )
