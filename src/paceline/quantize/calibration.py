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

    Raises ParameterError for a file that cannot be read, is no UTF-8, holds a line that is neither, or too little text.
    """
    documents = _documents(path, template)
    encoded = [tokenizer.encode(text, add_special_tokens=not is_chat) for text, is_chat in documents]
    rng = np.random.default_rng(seed)
    if len(encoded) > 1:
        separator = [] if tokenizer.add_bos else list(tokenizer.eos_token_ids[:1])
        ids = [token for index in rng.permutation(len(encoded)) for token in (*encoded[index], *separator)]
    else:
        ids = encoded[0]
    wanted = min(num_tokens, len(ids))
    if wanted < SMALLEST_TOKENS:
        where = "the built-in text" if path is None else str(path)
        raise ParameterError("calibration", where, f"at least {SMALLEST_TOKENS} tokens, and it gives {wanted}")
    length = min(sequence_tokens, wanted)
    whole = np.asarray(ids[: len(ids) // length * length], np.int32).reshape(-1, length)
    chosen = np.sort(rng.permutation(len(whole))[: max(1, wanted // length)])
    return Calibration(whole[chosen], "the built-in text" if path is None else path.name)


def _documents(path: Path | None, template: ChatTemplate | None) -> list[tuple[str, bool]]:
    """(text, whether a template wrote it), in the file's order."""
    if path is None:
        text = (files("paceline.quantize") / "data" / "calibration.jsonl").read_text("utf-8")
        return [_document(json.loads(line), template) for line in text.split("\n") if line]
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ParameterError("calibration", str(path), f"a file that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ParameterError("calibration", str(path), "UTF-8 text") from error
    if path.suffix not in (".jsonl", ".ndjson"):
        return [(text, False)]
    documents = []
    # Not splitlines: JSON may hold other characters that end a line, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("text", entry.get("messages")), (str, list)):
                raise ValueError
            documents.append(_document(entry, template, must_render=True))
        except ValueError:
            allowed = f'lines of JSON with "text" or "messages"; line {number} is none'
            raise ParameterError("calibration", str(path), allowed) from None
    if not documents:
        raise ParameterError("calibration", str(path), "a file with at least one line")
    return documents


def _document(
    entry: Mapping[str, Any], template: ChatTemplate | None, *, must_render: bool = False
) -> tuple[str, bool]:
    """A model without a template gets the built-in text's chats as plain paragraphs; a user's file is refused."""
    if isinstance(entry.get("text"), str):
        return entry["text"], False
    messages = entry["messages"]
    if template is not None:
        return template.render(messages, add_generation_prompt=False), True
    if must_render:
        raise ParameterError("calibration", "messages", "lines with text: the model has no chat template")
    return "\n\n".join(message["content"] for message in messages), False
