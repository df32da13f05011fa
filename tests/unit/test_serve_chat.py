"""`/v1/chat/completions` over a byte LLM: what each field does, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from byte_llm import byte_llm
from chatting import USER, WEATHER, answer, ask, chunks, joined, prompt_of, refusal
from served import MODEL

from paceline.serve.settings import ServeSettings

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
