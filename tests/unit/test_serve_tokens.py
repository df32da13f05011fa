"""Tests of `/tokenize`, `/detokenize`, `/tokenizer_info` and the model's card, and of how tokens are spelled."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from byte_llm import VOCAB, byte_llm
from fake_executor import FakeTokenizer
from served import MODEL, served

from paceline.engine.outputs import Completion, TokenLogprob, TopLogprob
from paceline.errors import RequestError
from paceline.serve.errors import HTTPError
from paceline.serve.logprobs import NO_PROBABILITY, TokenArrays, finite, prompt_arrays
from paceline.serve.outcomes import check_outcomes
from paceline.serve.spelling import Spelling, spelled


def ask(method: str, path: str, body: Any = None, **server: Any) -> httpx.Response:
    """The answer to one request."""

    async def run() -> httpx.Response:
        async with served(**server) as client:
            return await client.request(method, path, json=body)

    return asyncio.run(run())


def spelling_of(table: list[bytes]) -> Spelling:
    """Of a vocabulary and an end of text."""
    return Spelling(FakeTokenizer(len(table) + 1, table=[*table, b""]))


def test_tokens_of_a_text() -> None:
    document = ask("POST", "/tokenize", {"prompt": "hé", "return_token_strs": True, "model": MODEL}).json()
    assert document == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 0xC3, 0xA9],
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert ask("POST", "/tokenize", {"prompt": "h"}).json()["token_strs"] is None


@pytest.mark.parametrize("add", [True, False])
def test_tokens_of_messages_are_those_of_the_template(add: bool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    document = ask("POST", "/tokenize", {"messages": messages, "add_generation_prompt": add}).json()
    assert bytes(document["tokens"]).decode() == "user: hi\n" + ("assistant: " if add else "")


def test_text_of_tokens_spells_special_ones_out() -> None:
    assert ask("POST", "/detokenize", {"tokens": [104, VOCAB - 1, 0xC3]}).json() == {"prompt": "h<end>\ufffd"}
    assert ask("POST", "/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_had_is_a_400_that_names_the_field(path: str, body: Any, field: str) -> None:
    response = ask("POST", path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert field in (error["param"] or "") + error["message"]


def test_messages_without_a_template_are_a_400() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert ask("POST", "/tokenize", body, llm=byte_llm(chat=False)).status_code == 400


def test_info_names_the_special_tokens() -> None:
    info = ask("GET", "/tokenizer_info").json()
    assert info["eos_token"] == "<end>"
    assert info["bos_token"] is None
    assert info["vocab_size"] == VOCAB
    assert info["model_max_length"] == 4096


def test_card_of_the_model_by_name() -> None:
    assert ask("GET", f"/v1/models/{MODEL}").json() == ask("GET", "/v1/models").json()["data"][0] | {
        "created": ask("GET", f"/v1/models/{MODEL}").json()["created"]
    }
    missing = ask("GET", "/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_what_is_no_number_in_json_is_replaced() -> None:
    assert finite(float("-inf")) == finite(float("nan")) == NO_PROBABILITY
    assert finite(-0.25) == -0.25
    arrays = TokenArrays(spelling_of([b"a", b"b"])).document(
        [TokenLogprob(0, float("-inf"), b"a", (TopLogprob(1, 0.0, b"b"),))]
    )
    assert arrays["token_logprobs"] == [NO_PROBABILITY]
    assert arrays["top_logprobs"] == [{"a": NO_PROBABILITY, "b": 0.0}]


def test_bytes_that_are_no_text_are_named() -> None:
    assert spelled("é".encode()) == "é"
    assert spelled(b"\xc3") == "bytes:\\xc3"
    assert spelled(b" \xf0\x9f") == "bytes:\\x20\\xf0\\x9f"


def test_what_a_tokenizer_puts_before_a_text_has_no_width() -> None:
    pieces = [b"<s>", b" Hi", b" you"]  # as a SentencePiece tokenizer spells "Hi you"
    logprobs = [None, TokenLogprob(1, -1.0, pieces[1]), TokenLogprob(2, -2.0, pieces[2])]
    arrays = prompt_arrays(spelling_of(pieces), [0, 1, 2], "Hi you", logprobs)
    assert arrays["text_offset"] == [0, 0, 2]
    assert arrays["tokens"] == ["<s>", " Hi", " you"]
    assert arrays["token_logprobs"] == [None, -1.0, -2.0]


def test_aborted_answer_is_no_answer() -> None:
    whole = Completion("a", [97], "stop", 1)
    check_outcomes([whole])
    with pytest.raises(HTTPError):
        check_outcomes([whole, Completion("a", [97], "abort", 1)])
    with pytest.raises(RequestError):
        check_outcomes([Completion("", [], "error", 1, error=RequestError("broken"))])
