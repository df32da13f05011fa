"""TGI's endpoints as clients of Text Generation Inference see them: a real server, the real SmolLM2."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from server_process import ServerProcess

PROMPT = "The capital of Korea is"


@pytest.fixture
def client(server: ServerProcess) -> InferenceClient:
    """Hugging Face's own client; it asks `/`."""
    return InferenceClient(server.url)


def test_text_whole_and_streamed(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=16)
    assert "Seoul" in text
    assert "".join(client.text_generation(PROMPT, max_new_tokens=16, stream=True)) == text


def test_details_whole_and_streamed(client: InferenceClient) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 12, "details": True, "top_n_tokens": 2}
    whole = client.text_generation(PROMPT, decoder_input_details=True, **asked)
    assert whole.details is not None
    assert whole.details.finish_reason == "length"
    assert whole.details.generated_tokens == 12
    assert "".join(token.text for token in whole.details.tokens) == whole.generated_text
    assert "".join(token.text for token in whole.details.prefill) == PROMPT
    assert whole.details.top_tokens is not None
    for token, top in zip(whole.details.tokens, whole.details.top_tokens, strict=True):
        likeliest: Any = top[0]  # the client leaves what is nested so deep as it comes
        assert token.logprob == likeliest["logprob"], "greedy takes the likeliest"
    events = list(client.text_generation(PROMPT, stream=True, **asked))
    assert [event.token.logprob for event in events] == [token.logprob for token in whole.details.tokens]
    assert events[-1].generated_text == whole.generated_text
    assert events[-1].details is not None
    assert events[-1].details.input_length == len(whole.details.prefill)


def test_sampling_and_stops(client: InferenceClient) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    assert client.text_generation(PROMPT, **asked) == client.text_generation(PROMPT, **asked)
    text = client.text_generation(PROMPT, max_new_tokens=30, stop=["Seoul"])
    assert text.endswith("Seoul")
    assert client.text_generation(PROMPT, max_new_tokens=4, return_full_text=True).startswith(PROMPT)


def test_what_cannot_be_had_raises(client: InferenceClient) -> None:
    from huggingface_hub.errors import ValidationError

    with pytest.raises(ValidationError, match="watermark"):
        client.text_generation(PROMPT, watermark=True)
    with pytest.raises(ValidationError, match="context"):
        client.text_generation("word " * 9000)


def test_chat(client: InferenceClient) -> None:
    messages = [{"role": "user", "content": "What is the capital of Korea?"}]
    answer = client.chat_completion(messages, max_tokens=24, temperature=0)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Seoul" in text
    chunks = client.chat_completion(messages, max_tokens=24, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_grammar_and_schema(client: InferenceClient) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    for text in (
        client.text_generation(PROMPT, max_new_tokens=60, grammar={"type": "json", "value": schema}),
        client.chat_completion(
            [{"role": "user", "content": "The capital of Korea, as JSON."}],
            max_tokens=60,
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        )
        .choices[0]
        .message.content,
    ):
        found = json.loads(text or "")
        assert set(found) == {"city", "large"}
        assert isinstance(found["large"], bool)
    text = client.text_generation(PROMPT, max_new_tokens=8, grammar={"type": "regex", "value": "[0-9]{3}-[0-9]{2}"})
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", text)


def test_asynchronous_client(client: InferenceClient, server: ServerProcess) -> None:
    async def pieces() -> str:
        made = AsyncInferenceClient(server.url)
        stream = await made.text_generation(PROMPT, max_new_tokens=8, stream=True)
        return "".join([piece async for piece in stream])

    assert asyncio.run(pieces()) == client.text_generation(PROMPT, max_new_tokens=8)


def test_tgi_own_client(server: ServerProcess) -> None:
    """Needs an older huggingface_hub than Transformers does: it runs where it has been installed by itself."""
    text_generation = pytest.importorskip("text_generation")
    made = text_generation.Client(server.url)
    whole = made.generate(PROMPT, max_new_tokens=12, decoder_input_details=True)
    assert whole.details.generated_tokens == 12
    assert "".join(token.text for token in whole.details.prefill) == PROMPT
    events = list(made.generate_stream(PROMPT, max_new_tokens=12))
    assert "".join(event.token.text for event in events) == events[-1].generated_text == whole.generated_text
    with pytest.raises(text_generation.errors.ValidationError):
        made.generate(PROMPT, watermark=True)

    async def pieces() -> list[str]:
        other = text_generation.AsyncClient(server.url)
        whole = await other.generate(PROMPT, max_new_tokens=12, stop_sequences=["Seoul"])
        return [
            whole.generated_text,
            "".join([e.token.text async for e in other.generate_stream(PROMPT, max_new_tokens=12)]),
        ]

    stopped, streamed = asyncio.run(pieces())
    assert stopped.endswith("Seoul")
    assert streamed == whole.generated_text
