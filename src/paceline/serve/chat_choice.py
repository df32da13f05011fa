"""One choice of a chat, from what the engine says to what clients are told; whole answers and streams alike."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from paceline.engine.outputs import Completion, TokenLogprob
from paceline.serve.chat_logprobs import AlignedLogprobs, chat_logprobs
from paceline.serve.tools.calls import Arguments, CallStart, Piece, Text
from paceline.serve.tools.toolbox import Toolbox


class ChatChoice:
    """Reads an answer in one piece or in many; what comes out, joined, is the same."""

    def __init__(self, toolbox: Toolbox | None, *, has_logprobs: bool) -> None:
        self._calls = toolbox.reader() if toolbox is not None else None
        self._aligned = AlignedLogprobs() if has_logprobs else None
        self._logprobs: list[TokenLogprob] = []

    @property
    def has_tools(self) -> bool:
        """Whether the answer may be calls."""
        return self._calls is not None

    def read(
        self, text: str, logprobs: Sequence[TokenLogprob] | None, completion: Completion | None
    ) -> Sequence[Piece]:
        """What more text and its tokens come to; ``completion`` with the last."""
        if self._aligned is not None:
            is_cut = completion is not None and completion.finish_reason == "length"
            self._logprobs += self._aligned.feed(text, logprobs or (), is_cut=is_cut)
        if self._calls is None:
            return (Text(text),) if text else ()
        pieces = self._calls.feed(text)
        return pieces if completion is None else [*pieces, *self._calls.finish()]

    def take_logprobs(self) -> dict[str, Any] | None:
        """The document of the tokens since the last call; None where there are none, or none were asked for."""
        tokens, self._logprobs = self._logprobs, []
        return chat_logprobs(tokens) if tokens else None

    def finish_reason(self, completion: Completion) -> str:
        """Why the answer ended, in OpenAI's words. Calls that the limit cut off are an answer that it cut off."""
        calls = self._calls is not None and self._calls.num_calls > 0
        return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason


def call_document(start: CallStart, arguments: str = "") -> dict[str, Any]:
    """A call with an id of its own."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": start.name, "arguments": arguments},
    }


def message_document(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The assistant's message that some pieces make."""
    texts = [piece.text for piece in pieces if isinstance(piece, Text)]
    calls = [
        call_document(start, "".join(p.text for p in pieces if isinstance(p, Arguments) and p.index == start.index))
        for start in pieces
        if isinstance(start, CallStart)
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(texts) if texts or not calls else None,
        "refusal": None,
    }
    return {**message, "tool_calls": calls} if calls else message
