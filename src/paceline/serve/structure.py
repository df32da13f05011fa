"""From the ways in which clients say what an answer must be to the engine's structure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import ParameterError
from paceline.params import Structure
from paceline.serve.protocol.structure import (
    JSONObjectFormat,
    JSONSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
    TGIGrammar,
)


def structure_of(
    *,
    response_format: ResponseFormat | None = None,
    structured_outputs: StructuredOutputs | None = None,
    guided: Mapping[str, Any] | None = None,
) -> Structure | None:
    """The structure that a request asks for, None for free text. ``guided`` has the values of vLLM's ``guided_json``,
    ``guided_regex``, ``guided_choice`` and ``guided_grammar``, None where one is not given.

    Raises ``ParameterError`` where a request asks for more than one, or for an empty one.
    """
    found: dict[str, Structure] = {}
    if isinstance(response_format, JSONObjectFormat):
        schema = response_format.value
        found["response_format"] = (
            Structure("json_object", name="response_format")
            if schema is None
            else _structure("response_format", "json", schema)
        )
    elif isinstance(response_format, JSONSchemaFormat):
        found["response_format"] = _structure("response_format", "json", response_format.json_schema.schema_)
    for name, value in (guided or {}).items():
        if value is not None:
            found[name] = _structure(name, name.removeprefix("guided_"), value)
    if structured_outputs is not None:
        given = structured_outputs.model_dump(by_alias=True)
        if given.pop("json_object"):
            name = "structured_outputs.json_object"
            found[name] = Structure("json_object", name=name)
        for kind, value in given.items():
            if value is not None:
                name = f"structured_outputs.{kind}"
                found[name] = _structure(name, kind, value)
    if len(found) > 1:
        names = list(found)
        raise ParameterError(names[1], "a structure", f"one structure for an answer: {names[0]} is given as well")
    return next(iter(found.values()), None)


def structure_of_tgi(grammar: TGIGrammar) -> Structure:
    """The structure of Text Generation Inference's ``grammar``."""
    if grammar.type == "regex" and not isinstance(grammar.value, str):
        raise ParameterError("grammar", grammar.value, "an expression as text, for the type regex")
    return _structure("grammar", grammar.type, grammar.value)


def _structure(field: str, kind: str, value: Any) -> Structure:
    """One structure. ``field`` is what the client calls it; schemas may be JSON already, written as text."""
    if not value and value is not True and not isinstance(value, dict):
        raise ParameterError(field, value, "not empty")
    if kind == "json":
        return Structure("json_schema", value if isinstance(value, str) else json.dumps(value), field)
    if kind == "choice":
        return Structure("choice", json.dumps(value), field)
    return Structure("regex" if kind == "regex" else "grammar", value, field)
