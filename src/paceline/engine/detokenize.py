"""From tokens to text, piece by piece: never half a character, never any part of a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

TextPieces = tuple[tuple[str, bool], ...]
"""Text in pieces, each with whether accepted draft tokens made it; neighbours differ in that."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenText(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, empty for control tokens."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class TokenBytes(dict[int, bytes]):
    """The bytes of tokens; a tokenizer is asked once for each."""

    def __init__(self, tokenizer: TokenText) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._tokenizer.token_bytes(token_id)
        return value


class Utf8Decoder:
    """Bytes in, whole characters out; bytes that are no UTF-8 become U+FFFD, as in ``bytes.decode(errors="replace")``.

    ``missing`` continuation bytes at the very start are dropped: they complete a character that began before.
    """

    def __init__(self, missing: int = 0) -> None:
        self._decoder = _Utf8Decoder("replace")
        self._pending = False
        self._missing = missing

    def feed(self, piece: bytes) -> str:
        """The characters that are complete now."""
        if self._missing and piece:
            while self._missing and piece and 0x80 <= piece[0] < 0xC0:
                piece = piece[1:]
                self._missing -= 1
            if piece:
                self._missing = 0
        if not self._pending and piece.isascii():
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        self._pending = False
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Cuts text at the first stop string and holds back what may become one.

    The string that is complete first wins; of those complete at the same character, the longest. ``stopped`` tells that
    one was found: what comes after is dropped.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._first = frozenset(string[0] for string in stop)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that can be shown now."""
        if self.stopped:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        hold = self._possible_start(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """The held text, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first and any(stop.startswith(text[start:]) for stop in self._stop):
                return len(text) - start
        return 0


def missing_bytes(tail: bytes) -> int:
    """Continuation bytes that the last character of ``tail`` lacks, 0 when it is whole or no character."""
    for back in range(1, min(3, len(tail)) + 1):
        byte = tail[-back]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 0
            return max(0, length - back)
    return 0


class Detokenizer:
    """The text of one answer.

    A prompt that ends inside a character leaves its last bytes to the answer; they complete the prompt's character and
    are no text of the answer. What ``take`` returns, joined, is ``text``. A token is ``drafted`` when it was a node of
    an accepted draft.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._token_bytes = token_bytes
        tail = b""
        for token in reversed(prompt[-3:]):
            tail = self._token_bytes[token] + tail
        self._decoder = Utf8Decoder(missing_bytes(tail[-3:]))
        self._matcher = StopMatcher(stop) if stop else None
        self._pieces: list[str] = []
        self._drafted: list[bool] = []  # of each piece
        self._fed: deque[tuple[int, bool]] = deque()  # lengths of what the matcher has not released, drafted or not
        self._last_drafted = False
        self._num_taken = 0

    @property
    def text(self) -> str:
        """All text that was released so far."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher is not None and self._matcher.stopped

    def feed(self, token: int, *, may_stop: bool = True, drafted: bool = False) -> None:
        """Releases the text that a token completes; with ``may_stop`` False no stop string begins or ends in it."""
        self._last_drafted = drafted
        text = self._decoder.feed(self._token_bytes[token])
        if not text:
            return
        if self._matcher is not None and may_stop:
            self._fed.append((len(text), drafted))
            self._release(self._matcher.feed(text))
        else:
            self._pieces.append(text)
            self._drafted.append(drafted)

    def finish(self) -> None:
        """Releases the rest of the text, when no more tokens will come."""
        text = self._decoder.flush()
        self._fed.append((len(text), self._last_drafted))
        self._release(text if self._matcher is None else self._matcher.feed(text) + self._matcher.flush())

    def take(self) -> TextPieces:
        """The text released since the last call. A character belongs to the token that completed it."""
        first, self._num_taken = self._num_taken, len(self._pieces)
        if self._num_taken - first == 1:
            return ((self._pieces[first], self._drafted[first]),)
        return merge_pieces(zip(self._pieces[first:], self._drafted[first:], strict=True))

    def _release(self, text: str) -> None:
        """Adds text that was fed before, in pieces as it was fed."""
        start = 0
        while start < len(text):
            length, drafted = self._fed.popleft()
            end = min(start + length, len(text))
            if end > start:
                self._pieces.append(text[start:end])
                self._drafted.append(drafted)
            if start + length > end:  # the rest is held back
                self._fed.appendleft((start + length - end, drafted))
            start = end


def merge_pieces(pieces: Iterable[tuple[str, bool]]) -> TextPieces:
    """The same text in as few pieces as tell the same."""
    groups = groupby(pieces, key=itemgetter(1))
    return tuple(("".join([text for text, _ in group]), drafted) for drafted, group in groups)
