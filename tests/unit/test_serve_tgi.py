"""Tests of TGI's endpoints over a model of bytes: texts, tokens, details, and errors in TGI's form."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from byte_llm import VOCAB, byte_llm
from fake_executor import FakeExecutor, FakeTokenizer, tiny_model
from served import MODEL, events_of, served

from paceline.engine.outputs import Completion
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.serve.protocol.tgi import GenerateResponse, StreamResponse
from paceline.serve.settings import ServeSettings
from paceline.serve.spelling import Spelling
from paceline.serve.tgi_tokens import TokenTexts

START = "assistant: "


def ask(path: str, body: Any, method: str = "POST", **server: Any) -> httpx.Response:
    """The answer to one request."""

    async def run() -> httpx.Response:
        async with served(**server) as client:
            return await client.request(method, path, json=body)

    return asyncio.run(run())


def generated(text: str | None = None, /, **parameters: Any) -> dict[str, Any]:
    """What `/generate` says."""
    response = ask("/generate", {"inputs": START, "parameters": parameters}, text=text)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    GenerateResponse.model_validate(document)
    return document


def streamed(text: str | None = None, /, **parameters: Any) -> list[dict[str, Any]]:
    """The events of `/generate_stream`; checks their order and that they add up to the text at their end."""
    response = ask("/generate_stream", {"inputs": START, "parameters": parameters}, text=text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.startswith("data:{")
    events: list[dict[str, Any]] = events_of(response.text)
    for event in events:
        StreamResponse.model_validate(event)
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert all(event["generated_text"] is event["details"] is None for event in events[:-1])
    shown = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
    prompt = START if parameters.get("return_full_text") else ""
    assert prompt + shown == events[-1]["generated_text"]
    assert events[-1]["details"]["generated_tokens"] == len(events)
    return events


def test_text_alone_unless_details_are_asked_for() -> None:
    assert generated("hello", max_new_tokens=5) == {"generated_text": "hello"}
    assert ask("/generate", {"inputs": START, "parameters": {"max_new_tokens": 5}}, text="hello").json() == {
        "generated_text": "hello"
    }


def test_details_of_an_answer() -> None:
    document = generated("hi\0", details=True, decoder_input_details=True, top_n_tokens=2)
    details = document["details"]
    assert document["generated_text"] == "hi"
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == 3
    assert details["seed"] is None
    assert [token["text"] for token in details["tokens"]] == ["h", "i", "<end>"]
    assert [token["special"] for token in details["tokens"]] == [False, False, True]
    assert [token["id"] for token in details["tokens"]] == [*b"hi", VOCAB - 1]
    assert [len(tokens) for tokens in details["top_tokens"]] == [2, 2, 2]
    assert "".join(token["text"] for token in details["prefill"]) == START
    assert details["prefill"][0]["logprob"] is None
    with byte_llm(text="hi\0") as llm:
        expected = llm.generate(START, SamplingParams(logprobs=2, prompt_logprobs=0))
    assert [token["logprob"] for token in details["tokens"]] == [entry.logprob for entry in expected.logprobs or []]
    assert [token["logprob"] for token in details["prefill"]][1:] == [
        entry.logprob for entry in (expected.prompt_logprobs or [])[1:] if entry is not None
    ]


def test_stream_has_an_event_for_each_token() -> None:
    events = streamed("aé😀z\0", top_n_tokens=1)
    assert [event["token"]["text"] for event in events] == ["a", "", "é", "", "", "", "😀", "z", "<end>"]
    assert events[-1]["generated_text"] == "aé😀z"
    assert events[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 9,
        "seed": None,
        "input_length": len(START),
    }
    assert all(len(event["top_tokens"]) == 1 for event in events)
    assert "top_tokens" not in streamed("ab", max_new_tokens=2)[0]


def test_character_that_never_became_complete_is_marked() -> None:
    assert streamed("a😀", max_new_tokens=3)[-1]["generated_text"] == "a\ufffd"
    assert generated("a😀", max_new_tokens=3)["generated_text"] == "a\ufffd"


@pytest.mark.parametrize("stop", [["X"], ["XYZ"], ["XYZ", "XY"], ["YZ", "no"]])
def test_stop_sequence_is_part_of_the_text(stop: list[str]) -> None:
    text = {"X": "one X", "XYZ": "one XYZ", "YZ": "one XYZ"}[stop[0]]
    text = "one XY" if len(stop) == 2 and stop[1] == "XY" else text
    events = streamed("one XYZ two", stop=stop)
    assert events[-1]["generated_text"] == text
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert generated("one XYZ two", stop=stop)["generated_text"] == text


def test_what_a_token_holds_beyond_a_stop_sequence_is_cut() -> None:
    table = [b"ab", b"STOP!", b"o", b""]
    tokenizer = FakeTokenizer(4, table=table)
    texts = TokenTexts(tokenizer, Spelling(tokenizer), [2], ["STOP"])
    assert texts.feed(0) == "ab"
    assert texts.feed(1, Completion("ab", [0, 1], "stop", 1)) == "STOP"
    assert texts.text == "abSTOP"


def test_full_text_begins_with_the_prompt() -> None:
    assert generated("hello", max_new_tokens=5, return_full_text=True) == {"generated_text": START + "hello"}
    assert streamed("hello", max_new_tokens=5, return_full_text=True)[-1]["generated_text"] == START + "hello"


def test_greedy_unless_sampling_is_asked_for() -> None:
    greedy = generated(max_new_tokens=8, details=True)
    assert generated(max_new_tokens=8, details=True, temperature=1.0, top_p=1.0, do_sample=False) == greedy
    for asked in ({"do_sample": True}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.5}):
        sampled = generated(max_new_tokens=8, details=True, **asked)
        seed = sampled["details"]["seed"]
        assert seed is not None
        assert generated(max_new_tokens=8, details=True, seed=seed, **asked) == sampled, "the seed tells all"


def test_the_likeliest_of_several_is_given() -> None:
    document = generated(max_new_tokens=4, do_sample=True, best_of=3, details=True)
    others = document["details"]["best_of_sequences"]
    assert len(others) == 2

    def mean(details: dict[str, Any]) -> float:
        return sum(token["logprob"] for token in details["tokens"]) / len(details["tokens"])

    assert mean(document["details"]) >= mean(others[0]) >= mean(others[1])
    seed = document["details"]["seed"]
    without = generated(max_new_tokens=4, do_sample=True, best_of=3, seed=seed)
    assert without == {"generated_text": document["generated_text"]}


def test_prompt_is_truncated_from_the_left() -> None:
    whole = ask("/generate", {"inputs": "defg", "parameters": {"max_new_tokens": 6}}).json()
    cut = ask("/generate", {"inputs": "abcdefg", "parameters": {"max_new_tokens": 6, "truncate": 4}}).json()
    assert cut == whole


def test_address_alone_answers_both_ways() -> None:
    body = {"inputs": START, "parameters": {"max_new_tokens": 2}}
    assert ask("/", body, text="ok").json() == [{"generated_text": "ok"}]
    assert events_of(ask("/", {**body, "stream": True}, text="ok").text)[-1]["generated_text"] == "ok"


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"watermark": True}, "watermark"),
        ({"adapter_id": "other"}, "adapter_id"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"temperature": 0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 17, "do_sample": True}, "best_of"),
        ({"top_n_tokens": 21}, "top_n_tokens"),
        ({"truncate": 0}, "truncate"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": list("abcdefghijklmnopq")}, "stop"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_what_cannot_be_had_is_a_422_that_names_the_parameter(path: str, parameters: Any, field: str) -> None:
    response = ask(path, {"inputs": "x", "parameters": parameters})
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert field in response.json()["error"]


@pytest.mark.parametrize("parameters", [{"best_of": 2, "do_sample": True}, {"decoder_input_details": True}])
def test_what_a_stream_cannot_tell_is_refused(parameters: Any) -> None:
    response = ask("/generate_stream", {"inputs": "x", "parameters": parameters})
    assert response.status_code == 422
    assert next(iter(parameters)) in response.json()["error"]


@pytest.mark.parametrize("body", [{}, {"inputs": ""}, {"inputs": 1}, {"inputs": "x", "parameters": 1}])
def test_malformed_requests_are_a_422(body: Any) -> None:
    response = ask("/generate", body)
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"


def test_prompt_that_is_too_long_is_a_422() -> None:
    response = ask("/generate", {"inputs": "x" * 300}, llm=byte_llm(context_length=256))
    assert response.status_code == 422
    assert "300" in response.json()["error"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_failure_on_the_way_is_a_424(path: str) -> None:
    executor = FakeExecutor(model=tiny_model(VOCAB, 256), fail_when=7)
    table = [*(bytes([byte]) for byte in range(256)), b""]
    llm = LLM.from_parts(executor, FakeTokenizer(VOCAB, table=table))
    response = ask(path, {"inputs": "\x07", "parameters": {"max_new_tokens": 3}}, llm=llm)
    assert response.status_code == 424
    assert response.json()["error_type"] == "generation"


def test_info_tells_the_limits() -> None:
    document = ask("/info", None, "GET", settings=ServeSettings(max_prompt_tokens=100, max_stop=3)).json()
    assert document["model_id"] == MODEL
    assert document["max_total_tokens"] == 4096
    assert document["max_input_tokens"] == 100
    assert document["max_stop_sequences"] == 3
    assert document["version"]


def test_health_has_no_body() -> None:
    response = ask("/health", None, "GET")
    assert [response.status_code, response.text] == [200, ""]
