"""Tests of `/v1/completions` over a model of bytes: what is shown, how arrays align, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from byte_llm import VOCAB, byte_llm
from fake_executor import FakeExecutor, FakeTokenizer, tiny_model
from served import MODEL, events_of, served

from paceline.config import EngineConfig
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.serve.events import AnswerEvents
from paceline.serve.settings import ServeSettings

BYTES = [*(bytes([byte]) for byte in range(256)), b""]


def ask(body: dict[str, Any], **server: Any) -> httpx.Response:
    """The answer to one request."""

    async def once(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", json=body)

    return asking(once, **server)


def asking(work: Callable[[httpx.AsyncClient], Awaitable[Any]], **server: Any) -> Any:
    """What some work with a client returns."""

    async def run() -> Any:
        async with served(**server) as client:
            return await work(client)

    return asyncio.run(run())


def joined_choices(response: httpx.Response) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together; checks the order of its chunks."""
    events = events_of(response.text)
    assert events.pop() == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None, "a chunk after the last"
            assert piece["finish_reason"] is None or piece["text"] == "", "text and reason come separately"
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                so_far = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                choice["logprobs"] = {name: so_far[name] + piece["logprobs"][name] for name in so_far}
    return choices


def entries_of(arrays: dict[str, list[Any]]) -> list[tuple[str, float, dict[str, float]]]:
    """Token, log-probability and alternatives, a tuple each."""
    return list(zip(arrays["tokens"], arrays["token_logprobs"], arrays["top_logprobs"], strict=True))


def in_process(prompt: str, **params: Any) -> Any:
    """What the library says."""
    with byte_llm() as llm:
        return llm.generate(prompt, SamplingParams(**params))


def test_answer_has_the_form_of_openai() -> None:
    document = ask({"prompt": "hello", "temperature": 0, "max_tokens": 5, "model": MODEL}, text="abcdefgh").json()
    assert document["object"] == "text_completion"
    assert document["id"].startswith("cmpl-")
    (choice,) = document["choices"]
    assert choice == {"index": 0, "text": choice["text"], "logprobs": None, "finish_reason": "length"}
    assert len(choice["text"]) == 5
    assert document["usage"]["prompt_tokens"] == 5
    assert document["usage"]["completion_tokens"] == 5
    assert document["usage"]["total_tokens"] == 10
    assert "cached_tokens" in document["usage"]["prompt_tokens_details"]


def test_default_is_sixteen_tokens() -> None:
    assert ask({"prompt": "x", "temperature": 0, "ignore_eos": True}).json()["usage"]["completion_tokens"] == 16
    body = {"prompt": "x", "temperature": 0, "ignore_eos": True, "max_tokens": None}
    assert ask(body).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"], [[97, 98]]])
def test_every_form_of_prompt_is_the_same_prompt(prompt: Any, stream: bool) -> None:
    expected = in_process("ab", max_tokens=8)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "stream": stream}
    response = ask(body)
    choices = joined_choices(response) if stream else {c["index"]: c for c in response.json()["choices"]}
    assert [choices[0]["text"], choices[0]["finish_reason"]] == [expected.text, expected.finish_reason]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_prompt_i_are_numbered_from_i_times_n(stream: bool) -> None:
    body = {"prompt": ["ab", "cd", "ef"], "n": 2, "seed": 5, "max_tokens": 6, "ignore_eos": True, "stream": stream}
    response = ask(body)
    choices = joined_choices(response) if stream else {c["index"]: c for c in response.json()["choices"]}
    assert sorted(choices) == list(range(6))
    for number, prompt in enumerate(["ab", "cd", "ef"]):
        alone = in_process(prompt, temperature=1.0, n=2, seed=5, max_tokens=6, ignore_eos=True)
        for choice in range(2):
            assert choices[2 * number + choice]["text"] == alone.choices[choice].text


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_all_prompts_and_choices(stream: bool) -> None:
    body = {"prompt": ["abc", "defgh"], "n": 2, "max_tokens": 3, "ignore_eos": True, "stream": stream}
    response = ask({**body, **({"stream_options": {"include_usage": True}} if stream else {})})
    if stream:
        *chunks, last = events_of(response.text)[:-1]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        usage = last["usage"]
    else:
        usage = response.json()["usage"]
    assert [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]] == [8, 12, 20]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108, 108, 111]])
def test_echo_aligns_arrays_with_prompt_and_answer(prompt: Any, max_tokens: int, stream: bool) -> None:
    expected = in_process("hello", max_tokens=max(1, max_tokens), logprobs=2, prompt_logprobs=2)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    response = ask({**body, "stream": stream})
    choice = joined_choices(response)[0] if stream else response.json()["choices"][0]
    arrays = choice["logprobs"]
    answer = expected.logprobs[:max_tokens]
    assert choice["text"] == "hello" + (expected.text if max_tokens else "")
    assert arrays["tokens"][:5] == list("hello")
    assert {len(column) for column in arrays.values()} == {5 + len(answer)}
    assert arrays["token_logprobs"][0] is arrays["top_logprobs"][0] is None
    entries = [*expected.prompt_logprobs[1:], *answer]
    assert arrays["token_logprobs"][1:] == [entry.logprob for entry in entries]
    for text, logprob, top in entries_of(arrays)[1:]:
        assert top[text] == logprob
        assert len(top) in (2, 3)
    assert arrays["text_offset"][:5] == [0, 1, 2, 3, 4]
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == len(answer)


def test_prompt_alone_is_echoed_without_logprobs_too() -> None:
    document = ask({"prompt": "hello", "echo": True, "max_tokens": 0}).json()
    assert document["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert document["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_say_where_tokens_begin(stream: bool) -> None:
    text = "aé漢😀b"
    body = {"prompt": "user: é\nassistant: ", "temperature": 0, "max_tokens": len(text.encode()), "logprobs": 0}
    for echo in (False, True):
        response = ask({**body, "echo": echo, "stream": stream}, text=text)
        choice = joined_choices(response)[0] if stream else response.json()["choices"][0]
        arrays = choice["logprobs"]
        assert choice["text"].endswith(text)
        for token, offset in zip(arrays["tokens"], arrays["text_offset"], strict=True):
            if token.startswith("bytes:"):
                character = choice["text"][offset].encode()
                assert bytes.fromhex(token.removeprefix("bytes:\\x")) in character
            else:
                assert choice["text"][offset] == token


def test_end_of_text_has_an_entry_and_no_text() -> None:
    body = {"prompt": "assistant: ", "temperature": 0, "logprobs": 1, "max_tokens": 9}
    document = ask(body, text="ok\0").json()
    (choice,) = document["choices"]
    assert [choice["text"], choice["finish_reason"]] == ["ok", "stop"]
    assert choice["logprobs"]["tokens"] == ["o", "k", "<end>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert document["usage"]["completion_tokens"] == 3


def test_tokens_of_the_same_text_are_kept_apart() -> None:
    table = [b"a", b"a", b"\xff", b"\xff", b""]
    executor = FakeExecutor(model=tiny_model(5, 64))
    llm = LLM.from_parts(executor, FakeTokenizer(5, table=table))
    body = {"prompt": [0, 1], "temperature": 0, "logprobs": 5, "max_tokens": 2, "ignore_eos": True}
    arrays = ask(body, llm=llm).json()["choices"][0]["logprobs"]
    for text, logprob, top in entries_of(arrays):
        assert len(top) == 5, "one of the five tokens took another's place"
        assert top[text] == logprob
        assert {"a", "bytes:\\xff", "<end>"} < set(top)
        assert np.isclose(sum(np.exp(list(top.values()))), 1.0)


def test_half_a_character_of_the_prompt_does_not_reach_the_answer() -> None:
    body = {"prompt": [*b"a", 0xE6, 0xBC], "temperature": 0, "max_tokens": 4, "logprobs": 0, "stream": True}
    executor = _Continuing(b"\xa2ok!")  # 漢 is e6 bc a2
    choice = joined_choices(ask(body, llm=LLM.from_parts(executor, FakeTokenizer(VOCAB, table=BYTES))))[0]
    assert choice["text"] == "ok!"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xa2", "o", "k", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


class _Continuing(FakeExecutor):
    """Says some bytes, one after the other, whatever it is asked."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(model=tiny_model(VOCAB, 256))
        self._left = iter(answer)

    def run(self, plan: Any) -> Any:
        result = super().run(plan)
        result.sampled.tokens[-1] = next(self._left)
        return result


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_not_in_the_text(stream: bool) -> None:
    body = {"prompt": "assistant: ", "temperature": 0, "max_tokens": 50, "stop": ["XY", None], "stream": stream}
    response = ask(body, text="one two XY three")
    choice = joined_choices(response)[0] if stream else response.json()["choices"][0]
    assert [choice["text"], choice["finish_reason"]] == ["one two ", "stop"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 4}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"n": 17}, "n"),
        ({"stop": list("abcdefghijklmnopq")}, "stop"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_cannot_be_had_is_a_400_that_names_the_field(fields: dict[str, Any], field: str) -> None:
    response = ask({"prompt": "x", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in (error["param"] or error["message"])


def test_best_of_n_is_n() -> None:
    assert ask({"prompt": "x", "n": 2, "best_of": 2, "max_tokens": 1}).status_code == 200


def test_another_model_is_404() -> None:
    response = ask({"prompt": "x", "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("prompt", ["x" * 300, [120] * 300, [-1] * 300])
def test_prompt_that_is_too_long_is_an_error_with_both_numbers(prompt: Any) -> None:
    response = ask({"prompt": prompt}, llm=byte_llm(context_length=256))
    assert response.status_code == 400
    error = response.json()["error"]
    assert [error["code"], error["param"]] == ["context_length_exceeded", "prompt"]
    assert "300" in error["message"]
    assert "256" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_cannot_be_had_ends_all_of_them(stream: bool) -> None:
    async def work(client: httpx.AsyncClient) -> int:
        body = {"prompt": ["x", "y" * 300], "max_tokens": 200, "ignore_eos": True, "stream": stream}
        return (await client.post("/v1/completions", json=body)).status_code

    with byte_llm(context_length=256) as llm:
        status = asking(work, llm=llm)
    assert status == 400
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_limits_are_those_of_the_settings() -> None:
    settings = ServeSettings(max_logprobs=2, max_choices=1, max_stop=0, max_prompts=1)
    for fields in ({"logprobs": 3}, {"n": 2}, {"stop": "x"}, {"prompt": ["a", "b"]}):
        assert ask({"prompt": "x", **fields}, settings=settings).status_code == 400
    assert ask({"prompt": "x", "logprobs": 2, "n": 1}, settings=settings).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_step_is_an_error_and_not_an_answer(stream: bool) -> None:
    executor = FakeExecutor(model=tiny_model(VOCAB, 256), fail_when=7)
    llm = LLM.from_parts(executor, FakeTokenizer(VOCAB, table=BYTES))
    response = ask({"prompt": [[65], [7]], "max_tokens": 3, "stream": stream, "ignore_eos": True}, llm=llm)
    assert response.status_code >= 500
    assert "error" in response.json()


def test_failure_of_a_stream_that_has_begun_is_an_event() -> None:
    executor = FakeExecutor(model=tiny_model(VOCAB, 256), fail_when=7)
    llm = LLM.from_parts(executor, FakeTokenizer(VOCAB, table=BYTES))
    response = ask({"prompt": [7], "echo": True, "stream": True}, llm=llm)
    assert response.status_code == 200
    assert "event: error" in response.text
    assert "[DONE]" not in response.text
    assert "error" in events_of(response.text)[-1]


def test_placeholder_of_hugging_face_clients_is_this_model() -> None:
    for name in ("tgi", "dummy"):
        assert ask({"prompt": "x", "model": name, "max_tokens": 1}).json()["model"] == MODEL


def test_stream_that_nobody_began_to_read_is_aborted() -> None:
    async def never_begun() -> AsyncGenerator[bytes, None]:
        yield b"x"

    closed = []
    stream = SimpleNamespace(close=lambda: closed.append(True))
    asyncio.run(AnswerEvents(never_begun(), [cast(Any, stream)]).aclose())
    assert closed == [True]


def test_chunks_tell_which_of_their_text_was_drafted() -> None:
    options = {"include_drafted": True}
    body = {"prompt": "assistant: ", "temperature": 0, "max_tokens": 40, "stream": True, "stream_options": options}
    response = ask(body, llm=byte_llm(text="la la ", config=EngineConfig(speculate="suffix")))
    chunks = [chunk["choices"][0] for chunk in events_of(response.text)[:-1]]
    assert all("".join(text for text, _ in chunk["drafted"]) == chunk["text"] for chunk in chunks[:-1])
    assert any(drafted for chunk in chunks[:-1] for _, drafted in chunk["drafted"])
    assert "drafted" not in events_of(ask({**body, "stream_options": None}).text)[0]["choices"][0]
