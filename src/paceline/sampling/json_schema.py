"""JSON schemas as llguidance is given them, without what it would take and not hold.

Departures from what llguidance does by itself, each seen in an answer that another validator refuses:

- ``\\u`` escapes are not allowed in texts: a property's name that is spelled with one passes for an unknown name, whose
  value may be anything. Every character but the rarest control characters can be written without.
- So schemas whose own texts or patterns hold such characters are refused: they would be left out.
- ``minProperties`` counts a name that comes twice as two.
- A number between an excluded whole number and a bound less than one away from it may be that whole number. Bounds of
  parts that are combined meet somewhere, so there all pairs count.

Checked by: tests/property/test_schema_answers.py, benchmarks/json_schema.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

JSON_BLANKS = r"[ ]|\n[ ]{0,24}"
"""Between the parts of JSON: nothing, a blank, or a new line and its indentation. Small models never come back from
blanks without end."""

JSON_OPTIONS: dict[str, object] = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": JSON_BLANKS,
    "json_allowed_escapes": '"\\bfnrt',
}

_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""

_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef")

_RARE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
_RARE_IN_PATTERN = re.compile(_RARE.pattern + r"|\\(?:x[01{]|u00[01]|u\{|[c0va])")


def parse_schema(source: str) -> dict[str, Any]:
    """The schema that a text is. Raises ``ValueError``, with the reason, for what is none and what would not hold."""
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is no JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema that allows something, as an object")
    if "x-guidance" in schema:
        raise ValueError("x-guidance changes what JSON is: leave it out")
    check_schema(schema)
    return schema


def check_schema(schema: dict[str, Any]) -> None:
    """Raises ``ValueError`` for what llguidance takes and does not hold."""
    for text in _texts(schema):
        if _RARE.search(text):
            raise ValueError(f"control characters cannot be part of an answer's texts: {text!r}")
    for part in _parts(schema):
        patterns = [part.get("pattern"), *_mapping(part.get("patternProperties"))]
        for pattern in patterns:
            if isinstance(pattern, str) and _RARE_IN_PATTERN.search(pattern):
                raise ValueError(f"control characters cannot be part of an answer's texts: the pattern {pattern!r}")
        least, required = part.get("minProperties"), part.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least - num_required >= 2:
            raise ValueError("minProperties is at most one more than what is required: a name may come twice")
    parts = list(_parts(schema))
    is_combined = any(keyword in part for part in parts for keyword in _COMBINING)
    for together in [parts] if is_combined else [[part] for part in parts]:
        _check_bounds(together)


def _check_bounds(parts: list[dict[str, Any]]) -> None:
    """Raises ``ValueError`` where an excluded whole number could come back."""

    def bounds(keyword: str) -> list[float]:
        values = [part.get(keyword) for part in parts]
        return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]

    for excluded in bounds("exclusiveMinimum"):
        for highest in [*bounds("maximum"), *bounds("exclusiveMaximum")]:
            if excluded >= 0 and excluded % 1 == 0 and excluded <= highest < excluded + 1:
                raise ValueError(
                    f"exclusiveMinimum {excluded} with numbers up to {highest}: write it as a minimum above"
                )
    for excluded in bounds("exclusiveMaximum"):
        for lowest in [*bounds("minimum"), *bounds("exclusiveMinimum")]:
            if excluded <= 0 and excluded % 1 == 0 and excluded - 1 < lowest <= excluded:
                raise ValueError(f"exclusiveMaximum {excluded} with numbers from {lowest}: write it as a maximum below")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _parts(schema: object) -> Iterator[dict[str, Any]]:
    """All objects in a schema that may be schemas."""
    if isinstance(schema, list):
        for part in schema:
            yield from _parts(part)
    elif isinstance(schema, dict):
        yield schema
        for key, part in schema.items():
            if key not in _VALUES:
                yield from _parts(part)


def _texts(value: object) -> Iterator[str]:
    """All texts in a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _texts(part)
