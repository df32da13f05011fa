"""Calls of tools in chats, and what streams of chats look like when all goes well and when not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from byte_llm import VOCAB, PlainTemplate, byte_llm
from chatting import WEATHER, answer, ask, chunks, joined, refusal
from fake_executor import FakeExecutor, FakeTokenizer, tiny_model

from paceline.config import EngineConfig
from paceline.engine.outputs import Completion, Delta, FinishReason
from paceline.errors import RequestError
from paceline.llm import LLM
from paceline.serve.chat_choice import ChatChoice
from paceline.serve.chat_stream import ChunkWriter, chat_events
from paceline.serve.errors import HTTPError
from paceline.serve.sse import DONE, PING

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "서울"}}\n</tool_call>'


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
