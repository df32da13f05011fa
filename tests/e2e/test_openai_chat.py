"""Chat completions as OpenAI's own client sees them: a real server, the real SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from server_process import ServerProcess

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Korea?"}]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
        yield made


def test_an_answer_and_the_same_as_a_stream(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = client.chat.completions.create(model=server.model, messages=MESSAGES, temperature=0, max_tokens=24)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Seoul" in text
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24
    chunks = client.chat.completions.create(
        model=server.model, messages=MESSAGES, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
