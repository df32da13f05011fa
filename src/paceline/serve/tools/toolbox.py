"""The functions that an answer may call: which, in what style, and the grammar of an answer that must call one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import ParameterError
from paceline.params import Structure
from paceline.sampling.json_schema import JSON_OPTIONS, check_schema
from paceline.serve.protocol.tools import FunctionDefinition, NamedTool, Tool, ToolChoice
from paceline.serve.tools.calls import CallReader
from paceline.serve.tools.style import CallStyle

_SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": JSON_OPTIONS["json_allowed_escapes"],
}
"""For llguidance: arguments are spaced as templates write them, so the next turn finds this one in the cache; and a
model cannot go on with blanks for ever."""

_ANY_OBJECT = {"type": "object", "x-guidance": _SPACING}
_BLANKS = r"[ \t\r\n]*"
_OPEN_ENDED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")


@dataclass(frozen=True)
class Toolbox:
    """``must_call``: the answer is a call, or several, and nothing else."""

    style: CallStyle
    functions: tuple[FunctionDefinition, ...]
    must_call: bool
    is_parallel: bool

    @property
    def is_held(self) -> bool:
        """Whether a grammar holds the answer, so that what begins like a call is one: where there must be a call, and
        where a function is strict."""
        return self.must_call or any(function.strict for function in self.functions)

    @property
    def names(self) -> tuple[str, ...]:
        """What may be called."""
        return tuple(function.name for function in self.functions)

    def reader(self) -> CallReader:
        """A reader for one answer."""
        return CallReader(self.style, self.names, is_parallel=self.is_parallel, is_certain=self.is_held)

    def structure(self) -> Structure | None:
        """What the answer is held to, None where it may be anything."""
        return Structure("grammar", "\n".join(self._rules()), "tools") if self.is_held else None

    def _rules(self) -> Iterator[str]:
        """A Lark grammar. Its texts are calls, each with arguments that obey the function's schema, or, where none must
        be, text in which none begins. Functions that are not strict then take any object."""
        style, first = self.style, _quoted(self.style.written_opening)
        if not self.must_call:
            opens = f"(?s:.*){re.escape(style.opening)}".replace("<", r"\x3c")
            no_object = f" & /{_BLANKS}([^ \\t\\r\\n{{](?s:.*))?/" if style.is_bare else ""
            yield f"TEXT: /(?s:.*)/ & ~/{opens}(?s:.*)/{no_object}"
            if not style.is_bare:
                yield f"lead[lazy]: /{opens}/"
                first = "lead"
        more = f" ({_quoted(style.between + style.written_opening)} call)*" if self.is_parallel else ""
        yield f"start: {'' if self.must_call else 'TEXT | '}{first} call{more}"
        yield "call: " + " | ".join(f"call{number}" for number in range(len(self.functions)))
        for number, function in enumerate(self.functions):
            yield f"call{number}: {_quoted(style.head(function.name))} arguments{number} {_quoted(style.tail())}"
            schema = _held_schema(function) if self.must_call or function.strict else _ANY_OBJECT
            yield f"arguments{number}: %json {json.dumps(schema)}"


def choose_tools(
    tools: Sequence[Tool], choice: ToolChoice | None, style: CallStyle, *, is_parallel: bool
) -> Toolbox | None:
    """What a request's ``tools`` and ``tool_choice`` come to, None where nothing is to be called.

    Raises ``ParameterError`` for names that are there twice or not at all, and for schemas that are no object's.
    """
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ParameterError("tools", name, "each function has a name of its own")
    for tool in tools:
        _argument_schema(tool.function)
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        allowed = f"one of {', '.join(names)}" if names else "a function of `tools`, which are not given"
        raise ParameterError("tool_choice", choice.function.name, allowed)
    if choice == "required" and not tools:
        raise ParameterError("tool_choice", choice, "none or auto, since no `tools` are given")
    if choice == "none" or not tools:
        return None
    functions = tuple(tool.function for tool in tools)
    if isinstance(choice, NamedTool):
        named = tuple(function for function in functions if function.name == choice.function.name)
        return Toolbox(style, named, must_call=True, is_parallel=False)
    return Toolbox(style, functions, must_call=choice == "required", is_parallel=is_parallel)


def _argument_schema(function: FunctionDefinition) -> dict[str, Any]:
    """The schema of a function's arguments; closed where it lists properties and does not say that there are more."""
    schema: dict[str, Any] = {"type": "object", **(function.parameters or {"properties": {}}), "x-guidance": _SPACING}
    if schema["type"] != "object":
        raise ParameterError("tools", schema["type"], f"the parameters of {function.name} are a schema of type object")
    if "properties" in schema and not any(key in schema for key in _OPEN_ENDED):
        schema["additionalProperties"] = False
    return schema


def _held_schema(function: FunctionDefinition) -> dict[str, Any]:
    """The schema of arguments that obey it. Raises ``ParameterError`` where some would not."""
    schema = _argument_schema(function)
    try:
        check_schema(schema)
    except ValueError as error:
        raise ParameterError("tools", function.name, f"parameters that an answer can obey: {error}") from None
    return schema


def _quoted(text: str) -> str:
    """A string of a Lark grammar."""
    return json.dumps(text)
