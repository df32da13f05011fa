"""What quality is measured on: a text, or conversations of which the assistant's part counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ParameterError
from paceline.measure.quality.windows import Window, chunk_windows, sliding_windows

BUILT_IN = Path(__file__).parent / "data" / "text.txt"
"""Written for this purpose and published with this package under its licence, so that no model has seen it before; no
calibration text shares a line with it."""

Messages = Sequence[dict[str, Any]]


class Tokenizer(Protocol):
    """What turns text into tokens."""

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Template(Protocol):
    """What turns messages into text."""

    def render(self, messages: Messages, add_generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True)
class WindowShape:
    """How a text is cut: ``kind`` "sliding" or "chunks" (which have no stride), ``context`` and ``stride`` in
    tokens. Conversations slide."""

    kind: str = "sliding"
    context: int = 512
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("sliding", "chunks"):
            raise ParameterError("windows", self.kind, "sliding or chunks")
        if self.kind == "chunks" and self.stride is not None:
            raise ParameterError("stride", self.stride, "with sliding windows only: chunks lie side by side")

    @property
    def step(self) -> int:
        """Tokens from one window's start to the next one's."""
        if self.kind == "chunks":
            return self.context
        return self.stride if self.stride is not None else max(1, self.context // 2)


def text_windows(
    text: str, tokenizer: Tokenizer, shape: WindowShape, *, field: str, num_tokens: int | None = None
) -> list[Window]:
    """The windows of the first ``num_tokens`` tokens of ``text`` (None: all). ``field`` names it in errors.

    Raises ``ParameterError`` where nothing can be scored.
    """
    tokens = tokenizer.encode(text, False)[:num_tokens]
    prefix = _prefix(tokenizer)
    if len(tokens) + len(prefix) < 2:
        raise ParameterError(field, text[:40], "a text of at least two tokens: the first one has nothing before it")
    if shape.kind == "chunks":
        # A text begins with BOS, which chunks then have in the place of their first token.
        return chunk_windows([*prefix, *tokens][:num_tokens], context=shape.context, prefix=prefix)
    return sliding_windows(tokens, context=shape.context, stride=shape.step, prefix=prefix)


def chat_windows(
    conversations: Sequence[Messages],
    tokenizer: Tokenizer,
    template: Template,
    shape: WindowShape,
    *,
    num_tokens: int | None = None,
) -> list[Window]:
    """The windows of conversations, each read from its beginning; scored are the tokens that the assistant would have
    generated, the end of its turn included. With ``num_tokens``, no more of them.

    Raises ``ParameterError`` where nothing can be scored or a template rewrites what was said before.
    """
    if shape.kind == "chunks":
        raise ParameterError("windows", shape.kind, "sliding, for conversations")
    windows: list[Window] = []
    left = num_tokens
    for number, messages in enumerate(conversations, 1):
        tokens, scored = chat_tokens(messages, tokenizer, template, number=number)
        for window in sliding_windows(tokens, context=shape.context, stride=shape.step, scored=scored):
            targets = window.targets[:left]
            if len(targets):
                windows.append(Window(window.tokens, targets))
            if left is not None:
                left -= len(targets)
    if not windows:
        raise ParameterError("chat", f"{len(conversations)} conversations", "messages of the assistant to score")
    return windows


def chat_tokens(
    messages: Messages, tokenizer: Tokenizer, template: Template, *, number: int = 1
) -> tuple[list[int], NDArray[np.bool_]]:
    """The tokens of a conversation and which of them [tokens] the assistant says. They are the tokens that the engine
    sees: the prompt of each answer is encoded by itself, and so is the answer."""
    tokens: list[int] = []
    scored: list[bool] = []
    said = ""
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            prompt = template.render(messages[:at], add_generation_prompt=True)
            whole = template.render(messages[: at + 1], add_generation_prompt=False)
        except ParameterError as error:
            raise ParameterError("chat", f"conversation {number}", f"messages that fit: {error.allowed}") from error
        if not (prompt.startswith(said) and whole.startswith(prompt)):
            allowed = "conversations that the model's template renders turn by turn; it rewrites this one's past"
            raise ParameterError("chat", f"conversation {number}", allowed)
        before = tokenizer.encode(prompt[len(said) :], False)
        answer = tokenizer.encode(whole[len(prompt) :], False)
        # What a template puts behind the end of a turn is not the assistant's.
        ends = [place for place, token in enumerate(answer) if token in tokenizer.eos_token_ids]
        num_scored = ends[0] + 1 if ends else len(answer)
        tokens += before + answer
        scored += [False] * len(before) + [True] * num_scored + [False] * (len(answer) - num_scored)
        said = whole
    return tokens, np.array(scored, np.bool_)


def read_text(path: Path, *, field: str = "text") -> str:
    """The text of a file, its ends of lines as they are. Raises ``ParameterError`` for one that is missing, empty or no
    UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParameterError(field, str(path), f"a UTF-8 file; byte {error.start:,} of this one is not") from None
    except OSError as error:
        raise ParameterError(field, str(path), f"a file that can be read: {error.strerror}") from None
    if not text.strip():
        raise ParameterError(field, str(path), "a file that is not empty")
    return text


def read_conversations(path: Path) -> list[Messages]:
    """The conversations of a JSON-lines file: each line a list of messages, or an object with them under "messages".

    Raises ``ParameterError``, naming the line.
    """
    conversations: list[Messages] = []
    # Not splitlines: JSON may hold other characters that end a line, such as U+2028.
    for number, line in enumerate(read_text(path, field="chat").removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ParameterError("chat", f"{path}, line {number}", f"JSON on each line: {error}") from None
        messages = entry.get("messages") if isinstance(entry, dict) else entry
        if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
            allowed = 'a list of messages with a role each, or an object with them under "messages"'
            raise ParameterError("chat", f"{path}, line {number}", allowed)
        conversations.append(messages)
    return conversations


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    bos = tokenizer.bos_token_id
    return (bos,) if tokenizer.add_bos and bos is not None else ()
