"""Chat completions as OpenAI's own client sees them: a real server, the real SmolLM2."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam
from server_process import ServerProcess, running_server

KOREA: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Korea?"}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
CLOCK: ChatCompletionToolParam = {"type": "function", "function": {"name": "clock", "description": "The time"}}
TOOLS = [WEATHER, CLOCK]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, server: ServerProcess, **fields: Any) -> ChatCompletion:
    """A greedy answer, whole."""
    given: dict[str, Any] = {"model": server.model, "messages": KOREA, "temperature": 0, "max_tokens": 24, **fields}
    answer: ChatCompletion = client.chat.completions.create(**given)
    return answer


def streamed(client: openai.OpenAI, server: ServerProcess, **fields: Any) -> ChatCompletion:
    """The same, put together from its chunks by the client."""
    given: dict[str, Any] = {"model": server.model, "messages": KOREA, "temperature": 0, "max_tokens": 24, **fields}
    with client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
        return stream.current_completion_snapshot  # the final one would be refused where the limit cut it off


def text_of(answer: ChatCompletion) -> str:
    text = answer.choices[0].message.content
    assert text is not None
    return text


def calls_of(answer: ChatCompletion) -> list[tuple[str, Any]]:
    """The calls of an answer that has nothing else."""
    message = answer.choices[0].message
    assert message.content is None
    assert message.tool_calls
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls
        if call.type == "function"
    ]


# Answers


def test_an_answer_and_the_same_as_a_stream(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = ask(client, server)
    assert "Seoul" in text_of(answer)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    stream = client.chat.completions.create(
        model=server.model,
        messages=KOREA,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(answer)
    assert last.usage is not None
    assert last.usage.completion_tokens == answer.usage.completion_tokens
    assert last.usage.prompt_tokens == answer.usage.prompt_tokens
    assert last.usage.prompt_tokens_details is not None
    assert (last.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_choices_and_logprobs_are_the_same_as_a_stream(client: openai.OpenAI, server: ServerProcess) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 0.8, "logprobs": True, "top_logprobs": 2}
    whole, pieces = (each(client, server, **fields).choices for each in (ask, streamed))
    for one, other in zip(whole, pieces, strict=True):
        assert one.message.content == other.message.content
        assert one.logprobs is not None
        assert one.logprobs.content
        assert other.logprobs is not None
        assert one.logprobs.content == other.logprobs.content
        said = b"".join(bytes(token.bytes or ()) for token in one.logprobs.content)
        assert said.decode("utf-8", "replace") == one.message.content


def test_many_at_once_answer_as_one_alone(client: openai.OpenAI, server: ServerProcess) -> None:
    async def all_of_them(questions: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as asking:

            async def one(question: str) -> str:
                stream = await asking.chat.completions.create(
                    model=server.model,
                    messages=[{"role": "user", "content": question}],
                    temperature=0,
                    max_tokens=16,
                    stream=True,
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*map(one, questions)))

    questions = [f"Name {number} animals." for number in range(5)]
    alone = [text_of(ask(client, server, messages=[{"role": "user", "content": q}], max_tokens=16)) for q in questions]
    assert asyncio.run(all_of_them(questions)) == alone


def test_the_assistant_s_words_can_be_begun(client: openai.OpenAI, server: ServerProcess) -> None:
    messages = [*KOREA, {"role": "assistant", "content": "It is called Se"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    assert text_of(ask(client, server, messages=messages, extra_body=extra)).startswith("oul")


def test_what_was_drafted_is_told_when_asked_for(client: openai.OpenAI, server: ServerProcess) -> None:
    stream = client.chat.completions.create(
        model=server.model,
        messages=KOREA,
        temperature=0,
        max_tokens=24,
        stream=True,
        extra_body={"stream_options": {"include_drafted": True}},
    )
    pieces, text = [], ""
    for chunk in stream:
        pieces += (chunk.choices[0].model_extra or {}).get("drafted", [])
        text += chunk.choices[0].delta.content or ""
    assert "".join(piece for piece, _ in pieces) == text != ""


# Tools


@pytest.mark.parametrize("asking", [ask, streamed])
def test_a_named_function_is_called_as_its_schema_says(
    client: openai.OpenAI, server: ServerProcess, asking: Any
) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = asking(client, server, tools=TOOLS, tool_choice=named, max_tokens=80)
    ((name, arguments),) = calls_of(answer)
    assert name == "get_weather"
    assert set(arguments) == {"city", "unit"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_some_function_is_called_where_one_must_be(client: openai.OpenAI, server: ServerProcess) -> None:
    for seed in range(4):
        answer = ask(
            client,
            server,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.0,
            seed=seed,
            max_tokens=100,
        )
        ((name, _),) = calls_of(answer)
        assert name in ("get_weather", "clock")


def test_a_conversation_with_a_call_and_its_result(client: openai.OpenAI, server: ServerProcess) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    first = ask(client, server, tools=TOOLS, tool_choice=named, max_tokens=80)
    (call,) = first.choices[0].message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    history = [*KOREA, first.choices[0].message.model_dump(), result]
    answer = ask(client, server, messages=history, tools=TOOLS)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert first.usage is not None
    # The call is written as the template would write it, so it is found in the cache as far as it is cut into the same
    # tokens.
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > first.usage.prompt_tokens


# Structures


def test_an_answer_that_is_what_a_schema_says(client: openai.OpenAI, server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "million": {"type": "integer", "maximum": 99}},
        "required": ["city", "million"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}}
    for asking in (ask, streamed):
        found = json.loads(text_of(asking(client, server, response_format=wanted, max_tokens=60)))
        assert set(found) == {"city", "million"}


# Errors


def test_errors_are_the_client_s_own(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, server, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, server, model="gpt-4o")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, server, messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
    broken = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"pattern": "("}}}}
    with pytest.raises(openai.BadRequestError) as schema:
        ask(client, server, tools=[{"type": "function", "function": broken}], tool_choice="required")
    assert schema.value.param == "tools"


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that lets in who has a key, runs one answer and lets one wait, and does not wait for them at its end."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice: secret\n")
    with running_server(
        "--api-key-file", str(keys), "--max-batch", "1", "--max-queue", "1", "--shutdown-s", "0"
    ) as started:
        yield started


def test_a_wrong_key(small_server: ServerProcess) -> None:
    with openai.OpenAI(base_url=small_server.v1, api_key="guess", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(client, small_server)
        assert refused.value.code == "invalid_api_key"


def test_too_many_at_once(small_server: ServerProcess) -> None:
    async def crowd() -> openai.RateLimitError:
        async with openai.AsyncOpenAI(base_url=small_server.v1, api_key="secret", max_retries=0) as client:
            asking = [
                asyncio.ensure_future(
                    client.chat.completions.create(
                        model=small_server.model, messages=KOREA, extra_body={"ignore_eos": True}
                    )
                )
                for _ in range(4)
            ]
            done, running = await asyncio.wait(asking, return_when=asyncio.FIRST_EXCEPTION)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            (error, *_) = [task.exception() for task in done]
            assert isinstance(error, openai.RateLimitError)
            return error

    refused = asyncio.run(crowd())
    assert refused.code == "queue_full"
    assert int(refused.response.headers["retry-after"]) >= 1


def test_a_stream_that_is_broken_off_raises(small_server: ServerProcess) -> None:
    """Last in this file: it ends the server. The client tries again while the crowd of the test before leaves."""
    with openai.OpenAI(base_url=small_server.v1, api_key="secret", max_retries=5) as client:
        stream = client.chat.completions.create(
            model=small_server.model, messages=KOREA, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        small_server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stop"):
            for _ in stream:
                pass
