"""Answers with calls in them, or with what looks like calls, and a reader of them piece by piece."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.serve.tools.calls import Arguments, CallReader, Piece, Text
from paceline.serve.tools.hermes import HERMES
from paceline.serve.tools.llama3 import LLAMA3
from paceline.serve.tools.style import CallStyle

FUNCTIONS = ("weather", "clock")

HERMES_TEXTS = (
    "",
    " \n",
    "No call here, a < b.",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Seoul"}}\n</tool_call>',
    ' Let me see.\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
    '<tool_call>{"name":"weather","arguments":{"a":[1,-2.5e3,{"}":"]"}],"b":null}}</tool_call>\n'
    '<tool_call>{"arguments": {"zone": "한국 \\"\\u00e9\\" </tool_call>"}, "name": "clock"}</tool_call> \n',
    'a <tool_call>{"name": "clock", "arguments": {}} </tool_call> b <tool_call>{"name": "clock", "arguments": {}}',
    '<tool_call>{"name": "clock", "arguments": {}}</tool_ca',
    '<tool_call>{"name": "clock", "arguments": {}',
    '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": "\\x"}}</tool_call>',
    '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": ["clock"], "arguments": {}}</tool_call>',
    "It is written <tool_call> and then </tool_call>.",
    "<tool_call>",
    "x <tool_c",
    '<tool_call><tool_call>{"name": "clock", "arguments": {}}</tool_call>',
    '<tool_call>{"n<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
)
LLAMA3_TEXTS = (
    "",
    "\n",
    '{"name": "weather", "parameters": {"city": "Seoul"}}',
    ' <|python_tag|>{"name": "weather", "parameters": {"city": "Seoul"}}; {"name": "clock", "parameters": {}}',
    '{"name": "clock", "parameters": {}};{"name": "nobody", "parameters": {}} and so on',
    '{"name": "clock", "parameters": {}} That is it.',
    '{"type": "function", "name": "clock", "parameters": {"a;b": ";"}};',
    '{"celsius": 12}',
    '{"name": "clock"',
    '{ {"name": "clock", "parameters": {}}',
    'So: {"name": "clock", "parameters": {}}',
    "<|python_tag|>print(1)",
    "<|python_",
)
TEXTS: tuple[tuple[CallStyle, str], ...] = (
    *((HERMES, text) for text in HERMES_TEXTS),
    *((LLAMA3, text) for text in LLAMA3_TEXTS),
)


def read(style: CallStyle, texts: Iterable[str], *, is_parallel: bool = True, is_certain: bool = False) -> list[Piece]:
    """What comes of an answer in pieces, neighbours of a kind joined."""
    reader = CallReader(style, FUNCTIONS, is_parallel=is_parallel, is_certain=is_certain)
    found: list[Piece] = []
    for piece in [piece for text in texts for piece in reader.feed(text)] + reader.finish():
        last = found[-1] if found else None
        if isinstance(piece, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + piece.text)
        elif isinstance(piece, Arguments) and isinstance(last, Arguments) and piece.index == last.index:
            found[-1] = Arguments(last.index, last.text + piece.text)
        else:
            found.append(piece)
    return found
