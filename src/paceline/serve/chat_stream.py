"""A chat as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from paceline.engine.outputs import Completion, Delta
from paceline.serve.bridge import AnswerStream
from paceline.serve.chat_choice import ChatChoice, call_document
from paceline.serve.outcomes import check_outcomes
from paceline.serve.protocol.base import StreamOptions
from paceline.serve.sse import DONE, PING, event, json_text
from paceline.serve.tools.calls import Arguments, CallStart, Piece
from paceline.serve.usage import timings_document, usage_document


class ChunkWriter:
    """The bytes of the chunks. What all of them share is written once; a chunk costs the JSON of its text."""

    def __init__(self, head: dict[str, Any], choices: Sequence[ChatChoice], options: StreamOptions | None) -> None:
        self._head = head
        self._choices = choices
        self._has_usage = options is not None and options.include_usage
        self._has_drafted = options is not None and options.include_drafted
        self._begin = f"data: {json_text(head)[:-1]}"
        self._end = ',"usage":null}\n\n' if self._has_usage else "}\n\n"
        self._role = f'{{"role":"assistant","content":{"null" if choices[0].has_tools else json_text("")}}}'
        self._begun: set[int] = set()
        self._drafted: dict[int, list[tuple[str, bool]]] = {}  # of text whose chunk is still to come
        self._ended: dict[int, Completion] = {}

    def chunks(self, delta: Delta) -> str:
        """What a delta comes to: perhaps the role, text and calls, perhaps the reason of the end."""
        index, choice = delta.index, self._choices[delta.index]
        parts = []
        if index not in self._begun:
            self._begun.add(index)
            parts.append(self._chunk(index, self._role))
        pieces = choice.read(delta.text, delta.logprobs, delta.completion)
        if self._has_drafted and delta.pieces:
            self._drafted.setdefault(index, []).extend(delta.pieces)
        parts += [self._chunk(index, _delta(piece), extras=self._extras(index)) for piece in pieces]
        if delta.completion is not None:
            self._ended[index] = delta.completion
            reason = choice.finish_reason(delta.completion)
            parts.append(self._chunk(index, "{}", json_text(reason), self._extras(index)))
        return "".join(parts)

    def end(self) -> bytes:
        """Perhaps the usage, and the end."""
        if not self._has_usage:
            return DONE
        completions = [self._ended[index] for index in sorted(self._ended)]
        usage, timings = usage_document(completions), timings_document(completions[0])
        return event({**self._head, "choices": [], "usage": usage, "timings": timings}) + DONE

    def _chunk(self, index: int, delta: str, reason: str = "null", extras: str = ',"logprobs":null') -> str:
        choice = f'{{"index":{index},"delta":{delta}{extras},"finish_reason":{reason}}}'
        return f'{self._begin},"choices":[{choice}]{self._end}'

    def _extras(self, index: int) -> str:
        """What is due beside the next chunk of a choice."""
        logprobs = self._choices[index].take_logprobs()
        extras = ',"logprobs":null' if logprobs is None else f',"logprobs":{json_text(logprobs)}'
        drafted = self._drafted.pop(index, None)
        return extras if drafted is None else f'{extras},"drafted":{json_text(drafted)}'


async def chat_events(stream: AnswerStream, writer: ChunkWriter, ping_s: float) -> AsyncGenerator[bytes, None]:
    """The events of a stream. What comes at once is one piece: the socket is written to once.

    Raises what an answer failed of; there is no end mark then.
    """
    while stream.is_open:
        deltas = await stream.next(ping_s)
        check_outcomes(delta.completion for delta in deltas if delta.completion is not None)
        data = "".join(map(writer.chunks, deltas)).encode() if deltas else PING
        yield data if stream.is_open else data + writer.end()


def _delta(piece: Piece) -> str:
    """The ``delta`` of a chunk as JSON."""
    if isinstance(piece, CallStart):
        return json_text({"tool_calls": [{"index": piece.index, **call_document(piece)}]})
    if isinstance(piece, Arguments):
        return f'{{"tool_calls":[{{"index":{piece.index},"function":{{"arguments":{json_text(piece.text)}}}}}]}}'
    return f'{{"content":{json_text(piece.text)}}}'
