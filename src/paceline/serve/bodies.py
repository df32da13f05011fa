"""From the bytes of a request's body to what its endpoint takes, or to an error that says what is wrong where."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from paceline.serve.errors import HTTPError
from paceline.serve.settings import ServeSettings

MAX_DEPTH = 128
"""Lists and objects inside each other: what comes later recurses over them."""

LARGE_BODY = 2**17
"""Bytes from which a body is parsed in a thread of its own: the loop would pause for milliseconds."""

SWALLOWED_BYTES = 64 * 2**20
"""So much of a body that is too long is still read: most clients look for an answer only after all is sent."""

SHOWN_CHARACTERS = 80


async def read_body(http: Request, model: type[BaseModel], settings: ServeSettings) -> BaseModel:
    """The parsed body. ``HTTPError``: 408 too slow, 413 too long, 415 no JSON by its type, 400 not what is taken."""
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        given = repr(media_type) if media_type else "nothing"
        raise HTTPError(
            415,
            f"Content-Type says {given}: this endpoint takes application/json",
            code="unsupported_media_type",
            headers={"Connection": "close"},
        )
    try:
        data = await asyncio.wait_for(_receive(http, settings.max_body_bytes), settings.body_s)
    except asyncio.TimeoutError:
        raise HTTPError(
            408,
            f"the body did not arrive within {settings.body_s:g} s",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None
    if len(data) < LARGE_BODY:
        return parse_body(data, model)
    return await asyncio.to_thread(parse_body, data, model)


async def _receive(http: Request, max_bytes: int) -> bytes:
    """The body; 413 when it is longer than ``max_bytes``."""
    data = bytearray()
    num_bytes = 0
    waits_to_send = http.headers.get("expect", "").lower() == "100-continue"
    announced = http.headers.get("content-length", "")
    most = max_bytes if waits_to_send else max_bytes + SWALLOWED_BYTES
    if not (announced.isdecimal() and int(announced) > most):
        async for piece in http.stream():
            num_bytes += len(piece)
            if num_bytes <= max_bytes:
                data += piece
            elif num_bytes > max_bytes + SWALLOWED_BYTES:
                break
        if num_bytes <= max_bytes:
            return bytes(data)
    raise HTTPError(
        413,
        f"the body is longer than {max_bytes} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def parse_body(data: bytes, model: type[BaseModel]) -> BaseModel:
    """What ``data`` says, as ``model``; ``HTTPError`` 400 when it says something else."""
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_not_a_number,
            parse_float=_finite,
        )
        _check_depth(document)
        if b"\\ud" in data or b"\\uD" in data:  # halves of characters, which no text has
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise HTTPError(400, "the body is not UTF-8, or has half a surrogate pair", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        problem = f"deeper than {MAX_DEPTH} levels" if isinstance(error, RecursionError) else str(error)
        raise HTTPError(400, f"the body is no JSON that is taken here: {problem}", code="invalid_json") from None
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise _explained(error, document, model) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_shown(twice)} stands twice in one object")
    return found


def _not_a_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:SHOWN_CHARACTERS]} is too large a number")
    return number


def _check_depth(document: Any) -> None:
    """Raises ValueError for what is deeper than ``MAX_DEPTH``."""
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:
            raise ValueError(f"deeper than {MAX_DEPTH} levels")
        inner: list[Any] = []
        for value in level:
            if type(value) is dict:
                inner += value.values()
            elif type(value) is list:
                inner += value
        level = [value for value in inner if type(value) is dict or type(value) is list]


def _explained(error: ValidationError, document: Any, model: type[BaseModel]) -> HTTPError:
    """The first field that is wrong: where it is, what was given, what would be right."""
    details = error.errors(include_url=False, include_context=False)
    places = [_place(document, detail) for detail in details]
    # Of the alternatives of a field, the one that got furthest is the one that was meant.
    candidates = [place for place in places if place[:1] == places[0][:1]]
    place = max(candidates, key=len)
    wrong = [detail for detail, at in zip(details, places, strict=True) if at == place]
    where = ".".join(str(part) for part in place)
    kind = wrong[0]["type"]
    if kind == "extra_forbidden":
        allowed = f", the fields are {', '.join(sorted(model.model_fields))}" if len(place) == 1 else ""
        message = f"{where}: unknown field{allowed}"
    elif kind == "missing":
        message = f"{where}: this field is required"
    else:
        messages = dict.fromkeys(detail["msg"] for detail in wrong)
        message = f"{where or 'the body'}: {', or '.join(messages)}; given {_shown(wrong[0]['input'])}"
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}.get(kind, "invalid_value")
    return HTTPError(400, message, param=where or None, code=code)


def _place(document: Any, detail: ErrorDetails) -> Sequence[str | int]:
    """The path to a value, without the names of alternatives that pydantic's path also has."""
    value, place = document, []
    for index, part in enumerate(detail["loc"]):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            is_last = index == len(detail["loc"]) - 1
            if not (is_last and detail["type"] == "missing"):
                continue
        place.append(part)
    return tuple(place)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
