"""What is read of an answer does not depend on how it falls into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from call_texts import FUNCTIONS, TEXTS, read
from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.tools.hermes import HERMES
from paceline.serve.tools.json_object import JsonObject
from paceline.serve.tools.llama3 import LLAMA3
from paceline.serve.tools.style import CallStyle

MODES = ({}, {"is_parallel": False}, {"is_certain": True})


@pytest.mark.parametrize(("style", "text"), TEXTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_cut_in_two_and_every_character_alone(style: CallStyle, text: str, mode: dict[str, bool]) -> None:
    whole = read(style, [text], **mode)
    assert read(style, text, **mode) == whole
    for at in range(len(text) + 1):
        assert read(style, [text[:at], text[at:]], **mode) == whole


FRAGMENTS = ("<tool_call>", "</tool_call>", "<|python_tag|>", ";", " ", "\n", "{", "}", '"', "\\", "x", "<", "<tool")
CALLS = tuple(
    style.call(name, arguments)
    for style in (HERMES, LLAMA3)
    for name in (*FUNCTIONS, "nobody")
    for arguments in ("{}", '{"a": "b<tool_call>{"}', '{"a": }', "[]")
)


@given(
    st.lists(st.sampled_from(FRAGMENTS + CALLS), max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from((HERMES, LLAMA3)),
    st.sampled_from(MODES),
)
def test_random_answers_in_random_pieces(text: str, cuts: list[int], style: CallStyle, mode: dict[str, bool]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert "".join(pieces) == text
    assert read(style, pieces, **mode) == read(style, [text], **mode)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans(), st.sampled_from((None, 1)), st.text(max_size=5))
def test_objects_end_where_they_end_and_members_are_where_they_are(
    value: dict[str, object], ascii_only: bool, indent: int | None, behind: str
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    found = JsonObject()
    rest = "".join(found.feed(character) if not found.is_whole else character for character in text + behind)
    assert (found.text, rest, found.is_broken) == (text, behind, False)
    assert {key: json.loads(text[slice(*span)]) for key, span in found.spans.items()} == value


@given(st.text(alphabet='{}[]",:\\ \n01-.eEtrufalsn', max_size=30).map(lambda inner: "{" + inner))
def test_broken_and_whole_are_what_json_says(text: str) -> None:
    found = JsonObject()
    rest = found.feed(text)
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except ValueError:
        assert not found.is_whole or "\\" in text  # what is behind an escape is json's to judge
        return
    assert found.is_whole
    assert end == len(text) - len(rest)
