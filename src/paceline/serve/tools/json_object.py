"""Reads a JSON object that comes in pieces: where it ends, where it stops being JSON, and where its members lie."""

from __future__ import annotations

import json
import re
from typing import Literal

MAX_DEPTH = 100
"""Deeper nesting counts as a mistake: what reads the object next may recurse."""

BLANKS = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.A-Za-z0-9]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NAMES = ("true", "false", "null")

_Expected = Literal["value", "value or end", "key", "key or end", "colon", "comma or end"]


class JsonObject:
    """``text`` is what was read. ``is_whole`` once the object has ended, ``is_broken`` once it can be none: no more is
    read then.

    ``spans`` has the place in ``text`` of the value of each outermost member, its end None while it is being read.
    What is behind an escape is not looked at: whether a whole object is JSON, ``json.loads`` has the last word. The
    time it takes is in proportion to the text, however that is cut.
    """

    def __init__(self) -> None:
        self.text = ""
        self.is_whole = False
        self.is_broken = False
        self.spans: dict[str, tuple[int, int | None]] = {}
        self._position = 0
        self._open: list[str] = []
        self._expected: _Expected = "value"
        self._key = ""
        self._token_start: int | None = None  # of a string, number or name that has not ended
        self._is_escaped = False

    def feed(self, text: str) -> str:
        """Reads on; returns what lies behind the end of the object, or behind the mistake in it."""
        self.text += text
        while self._position < len(self.text) and not self.is_whole and not self.is_broken:
            if self._token_start is None:
                self._read_sign(self.text[self._position])
            elif self.text[self._token_start] == '"':
                self._read_string(self._token_start)
            else:
                self._read_word(self._token_start)
        rest = self.text[self._position :]
        self.text = self.text[: self._position]
        return rest

    def _read_sign(self, character: str) -> None:
        """One character that is in no string, number or name, or begins one."""
        expected = self._expected
        start = self._position
        self._position += 1
        if character in BLANKS:
            return
        if character in "}]":
            self._close(character)
        elif character == "," and expected == "comma or end":
            self._expected = "key" if self._open[-1] == "{" else "value"
        elif character == ":" and expected == "colon":
            self._expected = "value"
        elif character == '"' and expected in ("key", "key or end"):
            self._token_start = start
        elif expected in ("value", "value or end"):
            self._begin_value(character, start)
        else:
            self.is_broken = True

    def _begin_value(self, character: str, start: int) -> None:
        if not self._open and character != "{":
            self.is_broken = True
            return
        if len(self._open) == 1:
            self.spans[self._key] = (start, None)
        if character in "{[":
            self._open.append(character)
            self._expected = "key or end" if character == "{" else "value or end"
            self.is_broken = len(self._open) > MAX_DEPTH
        elif character == '"' or _WORD.fullmatch(character):
            self._token_start = start
        else:
            self.is_broken = True

    def _end_value(self, end: int) -> None:
        self._expected = "comma or end"
        if len(self._open) == 1:
            self.spans[self._key] = (self.spans[self._key][0], end)

    def _close(self, character: str) -> None:
        opened, may_be_empty = ("{", "key or end") if character == "}" else ("[", "value or end")
        if self._expected not in ("comma or end", may_be_empty) or self._open[-1] != opened:
            self.is_broken = True
            return
        self._open.pop()
        if self._open:
            self._end_value(self._position)
        else:
            self.is_whole = True

    def _read_string(self, start: int) -> None:
        """To the next backslash or quote, or over what a backslash escapes."""
        if self._is_escaped:
            self._is_escaped = False
            self.is_broken = self.text[self._position] not in '"\\/bfnrtu'
            self._position += 1
            return
        plain = _PLAIN.match(self.text, self._position)
        assert plain is not None
        self._position = plain.end()
        if self._position == len(self.text):
            return
        character = self.text[self._position]
        self._position += 1
        if character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._end_string(start)
        else:
            self.is_broken = True

    def _end_string(self, start: int) -> None:
        self._token_start = None
        if self._expected not in ("key", "key or end"):
            self._end_value(self._position)
            return
        self._expected = "colon"
        if len(self._open) == 1:
            try:
                self._key = json.loads(self.text[start : self._position])
            except ValueError:
                self.is_broken = True

    def _read_word(self, start: int) -> None:
        """To the end of a number or name; it has one where something else follows."""
        word = _WORD.match(self.text, self._position)
        assert word is not None
        self._position = word.end()
        if self._position == len(self.text):
            return
        self._token_start = None
        token = self.text[start : self._position]
        self.is_broken = token not in _NAMES and not _NUMBER.fullmatch(token)
        self._end_value(self._position)
