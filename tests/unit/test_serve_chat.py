"""`/v1/chat/completions` over a byte LLM: what each field does, what is refused, and what chunks look like."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
from byte_llm import VOCAB, PlainTemplate, byte_llm
from fake_executor import FakeExecutor, FakeTokenizer, tiny_model
from served import MODEL, events_of, served

from paceline.config import EngineConfig
from paceline.engine.outputs import Completion, Delta, FinishReason
from paceline.errors import RequestError
from paceline.llm import LLM
from paceline.serve.chat_choice import ChatChoice
from paceline.serve.chat_stream import ChunkWriter, chat_events
from paceline.serve.errors import HTTPError
from paceline.serve.protocol.chat import ChatChunk, ChatResponse
from paceline.serve.settings import ServeSettings
from paceline.serve.sse import DONE, PING

USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "서울"}}\n</tool_call>'


def ask(
    text: str | None = None,
    *,
    messages: Any = USER,
    llm: LLM | None = None,
    settings: ServeSettings | None = None,
    **fields: Any,
) -> httpx.Response:
    """The response to one request of a server that always says ``text``."""

    async def asking() -> httpx.Response:
        async with served(llm, settings, text=text) as client:
            return await client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})

    return asyncio.run(asking())


def answer(text: str | None = None, **fields: Any) -> dict[str, Any]:
    """The document of an answer, which must be what the protocol says."""
    response = ask(text, **fields)
    assert response.status_code == 200, response.text
    ChatResponse.model_validate(response.json(), strict=False)
    document: dict[str, Any] = response.json()
    return document


def chunks(text: str | None = None, **fields: Any) -> list[Any]:
    """The chunks of a stream, which must be what the protocol says, without the end mark, which must be there."""
    response = ask(text, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, end = events_of(response.text)
    assert end == "[DONE]"
    for chunk in found:
        ChatChunk.model_validate(chunk)
    return found


def refusal(**fields: Any) -> dict[str, Any]:
    """The error of a request that is refused with 400."""
    response = ask(**fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def prompt_of(llm_chat: Mapping[str, Any]) -> int:
    """Tokens of a prompt: its bytes here."""
    tokens: int = llm_chat["usage"]["prompt_tokens"]
    return tokens


def joined(found: Sequence[Any], index: int = 0) -> str:
    """The content of a choice."""
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in found
        for choice in chunk["choices"]
        if choice["index"] == index
    )


# Answers


def test_an_answer() -> None:
    document = answer("Hello.\0")
    assert document["object"] == "chat.completion"
    assert document["model"] == MODEL
    assert document["id"].startswith("chatcmpl-")
    choice = document["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert document["usage"]["completion_tokens"] == len("Hello.") + 1
    assert prompt_of(document) == len("user: hi\nassistant: ")


def test_a_stream_says_the_role_once_then_texts_then_why_it_ended() -> None:
    found = chunks("Hello.\0")
    assert len({chunk["id"] for chunk in found}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])
    assert (deltas[-1], reasons[-1]) == ({}, "stop")
    assert set(reasons[:-1]) == {None}
    assert joined(found) == "Hello."
    assert all("usage" not in chunk for chunk in found)


def test_usage_comes_last_when_asked_for_and_is_null_before() -> None:
    *before, last = chunks("Hello.\0", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in before)
    assert last["choices"] == []
    assert last["usage"] == answer("Hello.\0")["usage"]


def test_choices_are_streamed_side_by_side_each_with_its_role_and_end() -> None:
    found = chunks(None, n=3, seed=7, temperature=1, max_tokens=5)
    whole = answer(None, n=3, seed=7, temperature=1, max_tokens=5)
    for index in range(3):
        mine = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert joined(found, index) == whole["choices"][index]["message"]["content"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_longest_answer(name: str) -> None:
    choice = answer("Hello.\0", **{name: 3})["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hel", "length")


def test_without_a_limit_an_answer_goes_on_to_the_end_of_the_context() -> None:
    document = answer(llm=byte_llm(text="on and ", context_length=128))
    assert document["usage"]["total_tokens"] == 128
    assert document["choices"][0]["finish_reason"] == "length"


def test_stop_strings_may_have_empty_entries() -> None:
    choice = answer("one, two, three", stop=[None, ", th"])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one, two", "stop")
    assert answer("one, two, three", stop=", ")["choices"][0]["message"]["content"] == "one"


# Log-probabilities


def test_tokens_and_alternatives_of_the_text_that_is_shown() -> None:
    entries = answer("né, no\0", logprobs=True, top_logprobs=2, stop=", ")["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in "né".encode()]
    assert [entry["token"] for entry in entries] == ["n", "\ufffd", "\ufffd"]
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(other) for other in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0


def test_chunks_have_the_tokens_of_their_own_text() -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "stop": ["!?"]}
    found = chunks("né! 한국!?", **fields)
    entries = []
    for chunk in found:
        choice = chunk["choices"][0]
        mine = choice["logprobs"]["content"] if choice["logprobs"] else []
        assert b"".join(bytes(entry["bytes"]) for entry in mine).decode() == (choice["delta"].get("content") or "")
        entries += mine
    assert entries == answer("né! 한국!?", **fields)["choices"][0]["logprobs"]["content"]


def test_an_answer_cut_inside_of_a_character_shows_all_its_tokens() -> None:
    choice = answer("한", logprobs=True, max_tokens=2)["choices"][0]
    assert choice["message"]["content"] == "\ufffd"
    assert len(choice["logprobs"]["content"]) == 2


# Messages


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert prompt_of(answer("x\0", messages=[{"role": "user", "content": parts}])) == prompt_of(answer("x\0"))


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    message = answer("x\0")["choices"][0]["message"]
    history = [*USER, {**message, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}, *USER]
    assert prompt_of(answer("x\0", messages=history)) == len("user: hi\nassistant: x\nuser: hi\nassistant: ")


def test_developers_are_the_system() -> None:
    document = answer("x\0", messages=[{"role": "developer", "content": "!"}, *USER])
    assert prompt_of(document) == len("system: !\nuser: hi\nassistant: ")


def test_the_last_message_can_be_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "Hel "}]
    document = answer("Hello.\0", messages=messages, continue_final_message=True)
    assert prompt_of(document) == len("user: hi\nassistant: Hel ")
    assert document["choices"][0]["message"]["content"] == "o."


def test_the_template_may_be_told_to_open_no_answer() -> None:
    assert prompt_of(answer("x\0", add_generation_prompt=False, max_tokens=1)) == len("user: hi\n")


# What is refused


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "'assistant'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "'image_url' are not supported",
        ),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "max_completion_tokens (2)"),
        ({"max_tokens": 0}, "max_tokens", "between 1"),
        ({"top_logprobs": 1}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "at least 0"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"n": 17}, "n", "at most 16"),
        ({"n": 0}, "n", "between 1"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"reasoning_effort": "low"}, "reasoning_effort", ""),
        ({"modalities": ["audio"]}, "modalities.0", "'text'"),
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "false together with continue_final_message",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools", "a name of its own"),
        ({"tool_choice": "required"}, "tool_choice", "no `tools`"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "w"}}},
            "tool_choice",
            "weather",
        ),
        ({"tools": [{"type": "function", "function": {"name": "no blanks"}}]}, "tools.0.function.name", "pattern"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "type object",
        ),
    ],
)
def test_refused_with_the_name_of_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**fields)
    assert error["param"] == param
    assert words in error["message"]


def test_limits_are_the_server_s() -> None:
    assert "at most 1" in refusal(settings=ServeSettings(max_choices=1), n=2)["message"]


def test_without_a_template_the_other_endpoint_is_named() -> None:
    assert "/v1/completions" in refusal(llm=byte_llm(chat=False))["message"]


def test_another_model() -> None:
    response = ask(model="gpt-4o")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "field",
    [
        {"store": True},
        {"service_tier": "auto"},
        {"safety_identifier": "x"},
        {"prompt_cache_key": "x"},
        {"user": "x"},
        {"metadata": {"a": 1}},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
    ],
)
def test_harmless_fields_are_taken(field: dict[str, Any]) -> None:
    assert answer("x\0", **field)["choices"][0]["message"]["content"] == "x"


# Tools


def test_a_call_in_an_answer() -> None:
    choice = answer(f"{CALL}\0", tools=[WEATHER])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "서울"}'}


def test_calls_in_a_stream_begin_with_id_and_name() -> None:
    found = chunks(f"So: {CALL}{CALL}\0", tools=[WEATHER])
    assert joined(found) == "So:"
    deltas = [delta for chunk in found for delta in chunk["choices"][0]["delta"].get("tool_calls", [])]
    firsts = [delta for delta in deltas if "id" in delta]
    assert [delta["index"] for delta in firsts] == [0, 1]
    assert len({delta["id"] for delta in firsts}) == 2
    for first in firsts:
        assert first["type"] == "function"
        assert first["function"] == {"name": "weather", "arguments": ""}
        rest = [delta for delta in deltas if delta["index"] == first["index"] and delta is not first]
        assert all(set(delta) == {"index", "function"} for delta in rest)
        assert "".join(delta["function"]["arguments"] for delta in rest) == '{"city": "서울"}'
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    message = answer(f"{CALL}{CALL}\0", tools=[WEATHER], parallel_tool_calls=False)["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_what_looks_like_a_call_is_text(fields: dict[str, Any]) -> None:
    choice = answer(f"{CALL}\0", **fields)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


def test_a_call_that_is_cut_off_is_no_call() -> None:
    choice = answer(CALL, tools=[WEATHER], max_tokens=40)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL.encode()[:40].decode(), "length")


TWO_TOOLS = [WEATHER, {"type": "function", "function": {"name": "clock"}}]


def test_a_required_call_is_held_to_its_schema_whatever_the_model_would_say() -> None:
    choice = answer(tools=TWO_TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=3)
    message = choice["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["name"] in ("weather", "clock")


def test_a_named_call_is_streamed() -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    found = chunks(tools=TWO_TOOLS, tool_choice=named)
    deltas = [delta for chunk in found for delta in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0]["function"] == {"name": "clock", "arguments": ""}
    assert "".join(delta["function"]["arguments"] for delta in deltas) == "{}"
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_schema_that_does_not_compile_is_the_tools_fault() -> None:
    bad = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "pattern": "("}}}}
    error = refusal(tools=[{"type": "function", "function": bad}], tool_choice="required")
    assert error["param"] == "tools"


# Streams


def test_chunks_tell_what_was_drafted() -> None:
    fields = {"stream_options": {"include_drafted": True}, "max_tokens": 40}
    llm = byte_llm(text="again and ", config=EngineConfig(speculate="ngram"))
    found = chunks(llm=llm, **fields)
    drafted = [piece for chunk in found for piece in chunk["choices"][0].get("drafted", [])]
    assert "".join(text for text, _ in drafted) == joined(found) == ("again and " * 4)
    assert {was for _, was in drafted} == {True, False}
    assert all("drafted" not in choice for chunk in chunks("x\0") for choice in chunk["choices"])


def test_with_tools_what_was_drafted_is_told_of_calls_too() -> None:
    found = chunks(f"{CALL}\0", tools=[WEATHER], stream_options={"include_drafted": True})
    drafted = [text for chunk in found for text, _ in chunk["choices"][0].get("drafted", [])]
    assert "".join(drafted) == CALL


class ScriptedStream:
    """An answer of which some deltas come, or nothing for a while (None)."""

    def __init__(self, *script: Delta | None) -> None:
        self._script = list(script)

    @property
    def is_open(self) -> bool:
        return bool(self._script)

    async def next(self, timeout_s: float | None = None) -> list[Delta]:
        delta = self._script.pop(0)
        return [] if delta is None else [delta]


def ended(reason: FinishReason, error: Exception | None = None) -> Delta:
    return Delta("", [1], reason, completion=Completion("a", [1], reason, 1, error=error))


def events(*script: Delta | None) -> tuple[list[bytes], Exception | None]:
    """What is sent, and what is raised then."""
    writer = ChunkWriter({"id": "x"}, [ChatChoice(None, has_logprobs=False)], None)
    found: list[bytes] = []

    async def collecting() -> None:
        async for data in chat_events(ScriptedStream(*script), writer, 1.0):  # type: ignore[arg-type]
            found.append(data)

    try:
        asyncio.run(collecting())
    except Exception as error:
        return found, error
    return found, None


@pytest.mark.parametrize("end", [ended("error", RequestError("it broke")), ended("abort")])
def test_an_answer_that_failed_has_no_end(end: Delta) -> None:
    found, error = events(Delta("a", [1]), end)
    assert isinstance(error, RequestError if end.finish_reason == "error" else HTTPError)
    assert len(found) == 1
    assert b'"content":"a"' in found[0]


def test_silence_is_filled_with_comments() -> None:
    found, error = events(None, Delta("a", [1]), None, ended("stop"))
    assert error is None
    assert found[0] == found[2] == PING
    assert found[-1].endswith(DONE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_at_once_has_a_status(stream: bool) -> None:
    executor = FakeExecutor(model=tiny_model(VOCAB, 4096), num_pages=256, fail_when=ord("!"))
    table = [bytes([byte]) for byte in range(256)] + [b""]
    llm = LLM.from_parts(executor, FakeTokenizer(VOCAB, table=table), chat_template=PlainTemplate())
    response = ask(llm=llm, messages=[{"role": "user", "content": "!"}], stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


def test_tools_and_a_structure_exclude_each_other() -> None:
    error = refusal(tools=[WEATHER], response_format={"type": "json_object"})
    assert error["param"] == "tools"
    document = answer(tools=[WEATHER], tool_choice="none", response_format={"type": "json_object"}, max_tokens=1)
    assert document["choices"][0]["message"]["content"] == "{"


def test_null_is_no_stream() -> None:
    assert answer("x\0", stream=None)["object"] == "chat.completion"


def test_the_error_of_a_schema_says_what_is_wrong_with_it_and_nothing_of_grammars() -> None:
    wrong = {"name": "f", "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
    error = refusal(tools=[{"type": "function", "function": wrong}], tool_choice="required")
    assert "uniqueItems" in error["message"]
    assert "\n" not in error["message"]
