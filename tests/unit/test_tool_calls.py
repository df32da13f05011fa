"""Calls of functions in answers: what is one, what is none, and what stays text."""

from __future__ import annotations

import pytest
from call_texts import HERMES_TEXTS, LLAMA3_TEXTS, read

from paceline.serve.tools.calls import Arguments, CallReader, CallStart, Piece, Text
from paceline.serve.tools.hermes import HERMES
from paceline.serve.tools.json_object import MAX_DEPTH, JsonObject
from paceline.serve.tools.llama3 import LLAMA3


def call(index: int, name: str, arguments: str = "{}") -> list[Piece]:
    return [CallStart(index, name), Arguments(index, arguments)]


def hermes(text: str) -> list[Piece]:
    return read(HERMES, [text])


def llama3(text: str) -> list[Piece]:
    return read(LLAMA3, [text])


def test_a_call_and_text_before_it() -> None:
    assert hermes(HERMES_TEXTS[3]) == call(0, "weather", '{"city": "Seoul"}')
    assert hermes(HERMES_TEXTS[4]) == [Text(" Let me see."), *call(0, "clock")]


def test_several_calls_and_what_strings_may_hold() -> None:
    first, second = '{"a":[1,-2.5e3,{"}":"]"}],"b":null}', '{"zone": "한국 \\"\\u00e9\\" </tool_call>"}'
    assert hermes(HERMES_TEXTS[5]) == [*call(0, "weather", first), *call(1, "clock", second)]


def test_text_between_calls_keeps_its_blanks_before_it() -> None:
    assert hermes(HERMES_TEXTS[6]) == [Text("a"), *call(0, "clock"), Text(" b"), *call(1, "clock")]


def test_the_end_mark_may_be_missing_or_cut_off() -> None:
    assert hermes('<tool_call>{"name": "clock", "arguments": {}}') == call(0, "clock")
    assert hermes(HERMES_TEXTS[7]) == call(0, "clock")
    assert hermes(HERMES_TEXTS[7] + "n") == [*call(0, "clock"), Text("</tool_can")]


@pytest.mark.parametrize("text", [*HERMES_TEXTS[:3], *HERMES_TEXTS[8:17]])
def test_what_is_no_call_stays_text(text: str) -> None:
    assert hermes(text) == ([Text(text)] if text else [])


def test_a_call_inside_of_what_was_none() -> None:
    assert hermes(HERMES_TEXTS[17]) == [Text("<tool_call>"), *call(0, "clock")]
    assert hermes(HERMES_TEXTS[18]) == [Text('<tool_call>{"n'), *call(0, "clock")]


def test_llama_calls_begin_the_answer_or_follow_the_tag_or_a_call() -> None:
    assert llama3(LLAMA3_TEXTS[2]) == call(0, "weather", '{"city": "Seoul"}')
    assert llama3(LLAMA3_TEXTS[3]) == [*call(0, "weather", '{"city": "Seoul"}'), *call(1, "clock")]
    assert llama3(LLAMA3_TEXTS[4]) == [*call(0, "clock"), Text('{"name": "nobody", "parameters": {}} and so on')]
    assert llama3(LLAMA3_TEXTS[5]) == [*call(0, "clock"), Text("That is it.")]
    assert llama3(LLAMA3_TEXTS[6]) == call(0, "clock", '{"a;b": ";"}')


@pytest.mark.parametrize("text", [*LLAMA3_TEXTS[:2], *LLAMA3_TEXTS[7:]])
def test_llama_text_that_is_no_call(text: str) -> None:
    assert llama3(text) == ([Text(text)] if text else [])


def test_without_parallel_calls_the_first_one_ends_the_answer() -> None:
    assert read(HERMES, [HERMES_TEXTS[6]], is_parallel=False) == [Text("a"), *call(0, "clock")]


def test_text_comes_at_once_and_calls_when_they_are_whole() -> None:
    reader = CallReader(HERMES, ["clock"])
    assert reader.feed("One moment") == [Text("One moment")]
    assert reader.feed(", <tool") == [Text(",")]
    assert reader.feed('_call>{"name": "clock", "arguments": {"zone":') == []
    assert reader.feed(' "KST"}}') == call(0, "clock", '{"zone": "KST"}')


def test_what_cannot_be_a_call_any_more_is_not_held_back() -> None:
    reader = CallReader(HERMES, ["clock"])
    assert reader.feed("<tool_call>{name") == [Text("<tool_call>"), Text("{name")]


def test_arguments_of_a_certain_call_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, ["clock"], is_certain=True)
    assert reader.feed('<tool_call>\n{"name": "clock", "arguments": ') == []
    assert reader.feed('{"zone"') == call(0, "clock", '{"zone"')
    assert reader.feed(': "K') == [Arguments(0, ': "K')]
    assert reader.feed('ST"}}\n</tool_') == [Arguments(0, 'ST"}')]
    assert reader.feed("call>") == reader.finish() == []


def test_a_certain_call_that_was_cut_off_keeps_what_there_is() -> None:
    cut = ['<tool_call>\n{"name": "clock", "arguments": {"zone": "K']
    assert read(HERMES, cut, is_certain=True) == call(0, "clock", '{"zone": "K')
    assert read(HERMES, cut) == [Text(cut[0])]


def test_nesting_is_bounded() -> None:
    deep = '{"a":' * (MAX_DEPTH + 1)
    text = f'<tool_call>{{"name": "clock", "arguments": {deep}'
    assert hermes(text) == [Text(text)]


@pytest.mark.parametrize(
    "text",
    """{"a":1,} {,} {"a"} {"a":} {"a"1} {1:2} {"a":01} {"a":+1} {"a":nul} {"a":[1,]} {"a":NaN} {"a":[} {"a":1] [] 1 }
    {"a":"\\x"} {"a":1"b":2} {"a":.5} {"a":"\x01"} {"a",} {"a"::1} [1] "a" """.split(),
)
def test_mistakes_in_objects(text: str) -> None:
    found = JsonObject()
    found.feed(text)
    assert found.is_broken
    assert not found.is_whole
