"""How clients say what an answer must be, over a model of bytes that says noise."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import pytest
from byte_llm import byte_llm
from served import MODEL, served

from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.params import Structure
from paceline.serve.protocol.structure import StructuredOutputs, TGIGrammar
from paceline.serve.structure import structure_of, structure_of_tgi

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "c": {"enum": ["red", "blue"]}},
    "required": ["n", "c"],
    "additionalProperties": False,
}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "seed": 3, "max_tokens": 400}


def post(path: str, body: dict[str, Any], llm: LLM | None = None) -> httpx.Response:
    """The answer to one request."""

    async def once() -> httpx.Response:
        async with served(llm) as client:
            return await client.post(path, json=body)

    return asyncio.run(once())


def is_right(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"n", "c"} and value["n"] in range(10) and value["c"] in ("red", "blue")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=str,
)
def test_a_schema_in_each_of_its_forms(fields: dict[str, Any]) -> None:
    answer = post("/v1/chat/completions", {**CHAT, **fields}).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert is_right(choice["message"]["content"])
    answer = post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 400, **fields}).json()
    assert is_right(answer["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        ({"guided_regex": "[ab]{3}!"}, "[ab]{3}!"),
        ({"structured_outputs": {"regex": "[ab]{3}!"}}, "[ab]{3}!"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
        ({"response_format": {"type": "text"}, "guided_choice": ["yes"]}, "yes"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_other_kinds(fields: dict[str, Any], expression: str, stream: bool) -> None:
    response = post("/v1/chat/completions", {**CHAT, **fields, "stream": stream})
    if stream:
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert re.fullmatch(expression, text)


def test_any_json_object() -> None:
    body = {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 30}
    text = post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text.startswith("{")
    body = {**CHAT, "structured_outputs": {"json_object": True}, "max_tokens": 30}
    assert post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == text


def test_text_generation_inference() -> None:
    for grammar, expression in (
        ({"type": "regex", "value": "[ab]{3}!"}, "[ab]{3}!"),
        ({"type": "json", "value": {"enum": ["red", "blue"]}}, '"(red|blue)"'),
    ):
        body = {"inputs": "x", "parameters": {"grammar": grammar, "max_new_tokens": 50}}
        assert re.fullmatch(expression, post("/generate", body).json()["generated_text"])
    body = {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "("}}}
    answer = post("/generate", body)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("grammar=")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two": ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    "two of two kinds": ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    "an empty expression": ({"guided_regex": ""}, "guided_regex"),
    "no choices": ({"guided_choice": []}, "guided_choice"),
    "a keyword": ({"guided_json": {"not": {}}}, "guided_json"),
    "no expression": ({"guided_regex": "("}, "guided_regex"),
    "no grammar": ({"guided_grammar": "start: other"}, "guided_grammar"),
    "a keyword of a format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
    ),
    "no expression among outputs": ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    "a special token": ({"structured_outputs": {"grammar": "start: <a>"}}, "structured_outputs.grammar"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_a_400_that_names_it(name: str, stream: bool) -> None:
    fields, param = REFUSED[name]
    response = post("/v1/chat/completions", {**CHAT, **fields, "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"structured_outputs": {"disable_any_whitespace": True}},
        {"guided_choice": "yes"},
    ],
    ids=str,
)
def test_what_has_the_wrong_form_is_a_400(fields: dict[str, Any]) -> None:
    response = post("/v1/chat/completions", {**CHAT, **fields})
    assert response.status_code == 400
    assert next(iter(fields)) in response.text


def test_structures_by_themselves() -> None:
    assert structure_of() is None
    assert structure_of(guided={"guided_json": True}) == Structure("json_schema", "true")
    assert structure_of(structured_outputs=StructuredOutputs()) is None
    assert structure_of_tgi(TGIGrammar(type="json", value={})) == Structure("json_schema", "{}")
    with pytest.raises(ParameterError):
        structure_of_tgi(TGIGrammar(type="regex", value={}))


def test_compiling_does_not_hold_up_the_loop() -> None:
    """While one request's structure compiles, others are answered: the compiler waits until they were."""
    llm = byte_llm()
    others_are_answered, prepare, in_thread = threading.Event(), llm.prepare_structure, []

    def slowly(structure: Structure) -> None:
        in_thread.append(threading.current_thread() is not threading.main_thread())
        assert others_are_answered.wait(30)
        prepare(structure)

    llm.prepare_structure = slowly  # type: ignore[method-assign]

    async def run() -> None:
        async with served(llm) as client:
            body = {**CHAT, "guided_choice": ["yes"]}
            slow = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not in_thread:
                await asyncio.sleep(0)
            assert (await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4})).status_code == 200
            assert not slow.done()
            others_are_answered.set()
            assert (await slow).json()["choices"][0]["message"]["content"] == "yes"

    asyncio.run(run())
    assert in_thread == [True]
