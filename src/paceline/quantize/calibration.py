"""The tokens that a quantisation is measured on: a text, cut into sequences of one length.

A text is a UTF-8 file, or JSONL whose lines are {"text": ...} or {"messages": [...]}; messages go through the model's
chat template. The built-in text (data/calibration.jsonl, its source in data/README.md) is of the second kind: stories,
dialogue, explanations, letters, lists, tables, code, chats.

Documents are put one after the other in an order drawn from the seed, separated as the model separates them, and cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ParameterError
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer

SEQUENCE_TOKENS = 512
DEFAULT_TOKENS = 16384
"""The built-in text has fewer: with SmolLM2's tokenizer 11,800."""
SMALLEST_TOKENS = 128
"""Fewer say too little about a layer with hundreds of inputs."""
DATE = datetime(2025, 1, 1)
"""What templates that write the date get: the same codes come out on any day, and work goes on after midnight."""


@dataclass(frozen=True)
class Calibration:
    """``tokens`` [sequences, length] i32, and where they come from, for people."""

    tokens: NDArray[np.int32]
    source: str


def read_calibration(
    path: Path | None,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    num_tokens: int = DEFAULT_TOKENS,
    sequence_tokens: int = SEQUENCE_TOKENS,
    seed: int = 0,
) -> Calibration:
    """At most ``num_tokens`` of the file, or of the built-in text without one; the same for the same seed.

    Raises ParameterError for a negative seed, too few tokens, and a file that cannot be read, is no UTF-8, holds a line
    that is neither, or too little text.
    """
    if seed < 0:
        raise ParameterError("seed", seed, "0 or more")
    if num_tokens < SMALLEST_TOKENS:
        raise ParameterError("calibration_tokens", num_tokens, f"at least {SMALLEST_TOKENS}")
    encoded = [_encode(document, tokenizer) for document in _documents(path, template)]
    rng = np.random.default_rng(seed)
    if len(encoded) > 1:
        separator = [] if tokenizer.add_bos else list(tokenizer.eos_token_ids[:1])
        ids = [token for index in rng.permutation(len(encoded)) for token in (*encoded[index], *separator)]
    else:
        ids = encoded[0]
    wanted = min(num_tokens, len(ids))
    if wanted < SMALLEST_TOKENS:
        raise ParameterError("calibration", _place(path), f"at least {SMALLEST_TOKENS} tokens, and it gives {wanted}")
    length = min(sequence_tokens, wanted)
    whole = np.asarray(ids[: len(ids) // length * length], np.int32).reshape(-1, length)
    chosen = np.sort(rng.permutation(len(whole))[: max(1, wanted // length)])
    return Calibration(whole[chosen], "the built-in text" if path is None else path.name)


@dataclass(frozen=True)
class _Document:
    """``is_chat``: a template wrote it; ``where`` it comes from, for errors."""

    text: str
    is_chat: bool
    where: str


def _place(path: Path | None) -> str:
    return "the built-in text" if path is None else str(path)


def _documents(path: Path | None, template: ChatTemplate | None) -> list[_Document]:
    """In the file's order."""
    if path is None:
        text = (files("paceline.quantize") / "data" / "calibration.jsonl").read_text("utf-8")
        return [_document(json.loads(line), template, _place(None)) for line in text.split("\n") if line]
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ParameterError("calibration", str(path), f"a file that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ParameterError("calibration", str(path), "UTF-8 text") from error
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        return [_Document(text, False, str(path))]
    # Not splitlines: JSON may hold other characters that end a line, such as U+2028.
    lines = enumerate(text.split("\n"), 1)
    documents = [_parse(line, template, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not documents:
        raise ParameterError("calibration", str(path), "a file with at least one line")
    return documents


def _parse(line: str, template: ChatTemplate | None, where: str) -> _Document:
    """A line of a user's file. ParameterError, with ``where``, for what is no document or no chat of this model's."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    is_object = isinstance(entry, dict)
    is_chat = is_object and isinstance(entry.get("messages"), list)
    if not is_chat and not (is_object and isinstance(entry.get("text"), str)):
        raise ParameterError("calibration", where, 'JSON with "text" or with "messages", a list, on each line')
    if is_chat and template is None:
        raise ParameterError("calibration", where, "lines with text: the model has no chat template")
    try:
        return _document(entry, template, where)
    except ParameterError as error:
        raise ParameterError("calibration", where, error.allowed) from error


def _document(entry: Mapping[str, Any], template: ChatTemplate | None, where: str) -> _Document:
    """Without a template chats are plain paragraphs. It is told one date, so that the tokens do not change with it."""
    if isinstance(entry.get("text"), str):
        return _Document(entry["text"], False, where)
    messages = entry["messages"]
    if template is None:
        return _Document("\n\n".join(message["content"] for message in messages), False, where)
    text = template.render(messages, add_generation_prompt=False, variables={"strftime_now": DATE.strftime})
    return _Document(text, True, where)


def _encode(document: _Document, tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode(document.text, add_special_tokens=not document.is_chat)
    except ParameterError as error:
        raise ParameterError("calibration", document.where, error.allowed) from error
