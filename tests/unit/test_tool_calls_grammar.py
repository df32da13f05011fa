"""The grammars of answers that are held to calls: which texts they allow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from call_texts import read
from grammar_vocabulary import VOCAB, GrammarTokenizer

from paceline.errors import ParameterError
from paceline.sampling.grammar import GrammarCompiler
from paceline.serve.protocol.tools import FunctionDefinition, NamedTool, Tool, ToolChoice
from paceline.serve.tools.calls import Arguments, CallStart
from paceline.serve.tools.hermes import HERMES
from paceline.serve.tools.llama3 import LLAMA3
from paceline.serve.tools.style import CallStyle
from paceline.serve.tools.toolbox import Toolbox, choose_tools

STYLES = pytest.mark.parametrize("style", [HERMES, LLAMA3], ids=lambda style: style.name)
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/name"}}, "required": ["city"]}
SCHEMA = {**CITY, "$defs": {"name": {"type": "string"}}}
SEOUL = '{"city": "서울"}'


Allows = Callable[[Toolbox, str], bool]


@pytest.fixture(scope="module")
def allows() -> Allows:
    """Whether a whole answer is one that a toolbox allows."""
    compiler = GrammarCompiler(GrammarTokenizer(), VOCAB)

    def allowed(toolbox: Toolbox, text: str) -> bool:
        structure = toolbox.structure()
        assert structure is not None
        matcher = compiler.compile(structure).matcher()
        data = list(text.encode())
        if matcher.num_allowed(data) < len(data):
            return False
        for byte in data:
            matcher.advance(byte)
        return matcher.may_end

    return allowed


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool | None = None) -> Tool:
    return Tool(type="function", function=FunctionDefinition(name=name, parameters=parameters, strict=strict))


def toolbox(style: CallStyle, choice: ToolChoice, *, is_parallel: bool = True, strict: bool = False) -> Toolbox:
    """Of `weather`, which may be strict, and `clock`, which has no arguments."""
    tools = [tool("weather", SCHEMA, strict=strict), tool("clock")]
    found = choose_tools(tools, choice, style, is_parallel=is_parallel)
    assert found is not None
    return found


@STYLES
def test_required_calls_and_nothing_else(allows: Allows, style: CallStyle) -> None:
    required = toolbox(style, "required")
    one, other = style.call("weather", SEOUL), style.call("clock", "{}")
    assert allows(required, one)
    assert allows(required, one + style.between + other)
    for text in ("", "Well.", f"Well. {one}", f"{one} done", style.call("nobody", "{}"), one + other + "x"):
        assert not allows(required, text)
    assert not allows(toolbox(style, "required", is_parallel=False), one + style.between + other)


@STYLES
@pytest.mark.parametrize("arguments", ["{}", '{"city": 1}', '{"city": "x", "more": 1}', '{"city":"x"}', "null"])
def test_arguments_obey_the_schema(allows: Allows, style: CallStyle, arguments: str) -> None:
    assert not allows(toolbox(style, "required"), style.call("weather", arguments))


def test_schemas_that_say_so_are_open(allows: Allows) -> None:
    open_ended = [tool("weather", {**SCHEMA, "additionalProperties": {"type": "integer"}})]
    found = choose_tools(open_ended, "required", HERMES, is_parallel=False)
    assert found is not None
    assert allows(found, HERMES.call("weather", '{"city": "x", "more": 1}'))


@STYLES
def test_a_named_function_is_the_only_one(allows: Allows, style: CallStyle) -> None:
    named = toolbox(style, NamedTool.model_validate({"type": "function", "function": {"name": "weather"}}))
    one = style.call("weather", SEOUL)
    assert allows(named, one)
    assert not allows(named, style.call("clock", "{}"))
    assert not allows(named, one + style.between + one)


@STYLES
def test_strict_functions_hold_calls_but_not_text(allows: Allows, style: CallStyle) -> None:
    strict = toolbox(style, "auto", strict=True)
    for text in ("", "a < b {c}", "two\nlines", style.call("weather", SEOUL), style.call("clock", '{"any": 1}')):
        assert allows(strict, text)
    assert not allows(strict, style.call("weather", '{"city": 1}'))
    assert not allows(strict, f"x {style.opening} y")
    lead = "" if style.is_bare else "Let me see: "
    assert allows(strict, lead + style.call("weather", SEOUL) + style.between + style.call("weather", SEOUL))


@STYLES
def test_what_is_allowed_is_read_as_calls(style: CallStyle) -> None:
    text = style.call("weather", SEOUL) + style.between + style.call("clock", "{}")
    first = [CallStart(0, "weather"), Arguments(0, SEOUL)]
    assert read(style, [text], is_certain=True) == [*first, CallStart(1, "clock"), Arguments(1, "{}")]


def test_nothing_holds_answers_that_may_be_anything() -> None:
    assert toolbox(HERMES, "auto").structure() is None


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_no_tools_no_toolbox(choice: ToolChoice | None) -> None:
    assert choose_tools([], choice, HERMES, is_parallel=True) is None


def test_schemas_of_anything_but_objects_are_refused() -> None:
    with pytest.raises(ParameterError, match="a schema of type object"):
        choose_tools([tool("f", json.loads('{"type": "string"}'))], None, HERMES, is_parallel=True)


@STYLES
def test_a_name_spelled_with_escapes_is_no_way_around_the_schema(allows: Allows, style: CallStyle) -> None:
    open_ended = {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    found = choose_tools([tool("f", open_ended)], "required", style, is_parallel=False)
    assert found is not None
    assert allows(found, style.call("f", '{"a": 1, "b": "x"}'))
    assert not allows(found, style.call("f", '{"\\u0061": "x"}'))


def test_parameters_that_would_not_hold_are_refused_where_they_must() -> None:
    tools = [tool("f", {"additionalProperties": {"type": "integer"}, "minProperties": 2})]
    required = choose_tools(tools, "required", HERMES, is_parallel=False)
    assert required is not None
    with pytest.raises(ParameterError, match="minProperties"):
        required.structure()
    assert choose_tools(tools, "auto", HERMES, is_parallel=False) is not None
