"""Finds calls of functions in an answer while it is written.

What comes out depends on the text alone, not on the pieces that it comes in. Blanks between a call and the beginning,
the end or another call belong to nobody.
What looks like a call and is none - not JSON, no known function, arguments that are no object - stays text, and since
that is known at the end only, such a call comes out at once when it is whole. An answer that cannot be but calls,
because a grammar holds it to that, gives out arguments as they are written.

Checked by: tests/unit/test_tool_calls.py, tests/property/test_tool_splits.py (all ways to cut a text).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from paceline.serve.tools.json_object import BLANKS, JsonObject
from paceline.serve.tools.style import CallStyle


@dataclass(frozen=True)
class Text:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The call number ``index`` of an answer has begun."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of a call, which joined are JSON."""

    index: int
    text: str


Piece = Text | CallStart | Arguments

_Where = Literal["text", "opening", "object", "behind", "end"]


class CallReader:
    """Text in, pieces out. ``functions`` are the names that may be called, ``is_parallel`` allows more than one call
    (what follows the first is dropped otherwise), ``is_certain`` says that there can be nothing but calls."""

    def __init__(
        self, style: CallStyle, functions: Collection[str], *, is_parallel: bool = True, is_certain: bool = False
    ) -> None:
        self._style = style
        self._functions = frozenset(functions)
        self._is_parallel = is_parallel
        self._is_certain = is_certain
        self.num_calls = 0
        self._where: _Where = "text"
        self._unread = ""
        self._is_last = False  # no more text will come
        self._blanks = ""  # whether they are text depends on what follows
        self._may_be_bare = style.is_bare
        self._has_text = False
        self._follows_call = False
        self._lead = ""  # what stood before the object that is being read
        self._object = JsonObject()
        self._num_given: int | None = None  # characters of arguments given out; None before the call has begun
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """What is certain after more text."""
        self._unread += text
        steps = {
            "text": self._read_text,
            "opening": self._read_opening,
            "object": self._read_object,
            "behind": self._read_behind,
            "end": self._drop,
        }
        while self._unread and steps[self._where]():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """What is certain once no more text will come."""
        self._is_last = True
        pieces = self.feed("")
        while self._where in ("opening", "object"):
            self._give_up()
            pieces += self.feed("")
        if self._blanks and not self._follows_call:
            pieces.append(Text(self._blanks))
        return pieces

    # Each step reads some of the text and returns whether it, or another, can go on.

    def _read_text(self) -> bool:
        """Gives out text up to what may open a call."""
        if self._may_be_bare:
            inner = self._unread.lstrip(BLANKS)
            if inner.startswith("{"):
                self._enter_object(self._unread[: -len(inner)], inner)
                return True
            if not inner and not self._is_last:
                return False
        opening = self._style.opening
        at = self._unread.find(opening)
        if at >= 0:
            self._say(self._unread[:at])
            self._unread = self._unread[at + len(opening) :]
            self._lead = opening
            self._object = JsonObject()
            self._num_given = None
            self._where = "opening"
            return True
        held = 0 if self._is_last else _overlap(self._unread, opening)
        self._say(self._unread[: len(self._unread) - held])
        self._unread = self._unread[len(self._unread) - held :]
        return False

    def _read_opening(self) -> bool:
        """Behind an opening: an object follows, or it was none."""
        inner = self._unread.lstrip(BLANKS)
        self._lead += self._unread[: len(self._unread) - len(inner)]
        self._unread = inner
        if not inner:
            return False
        if inner[0] == "{":
            self._enter_object(self._lead, inner)
        else:
            self._give_up()
        return True

    def _enter_object(self, lead: str, unread: str) -> None:
        self._lead, self._unread = lead, unread
        self._object = JsonObject()
        self._num_given = None
        self._where = "object"

    def _read_object(self) -> bool:
        self._unread = self._object.feed(self._unread)
        if self._is_certain:
            self._give_arguments()
        if self._object.is_broken:
            self._give_up()
            return True
        if not self._object.is_whole:
            return False
        if self._num_given is None and not self._give_whole_call():
            self._give_up()
            return True
        self._follows_call = True
        self._may_be_bare = self._style.is_bare
        self._where = "behind" if self._is_parallel else "end"
        return True

    def _give_up(self) -> None:
        """What was being read is no call: it is text, and may hold another. A call that has begun ends here."""
        self._where = "text"
        if self._num_given is not None:
            self._follows_call = True
            return
        text = self._object.text + self._unread
        first = "" if self._lead.strip(BLANKS) else text[0]  # without an opening, what would open it once more
        self._say(self._lead + first)
        self._unread = text[len(first) :]

    def _read_behind(self) -> bool:
        """Behind a call: drops the closing, or what there is of one at the very end, and the blanks before it."""
        inner = self._unread.lstrip(BLANKS)
        closing = self._style.closing
        if inner.startswith(closing):
            self._unread = inner[len(closing) :]
        elif closing.startswith(inner):  # so far
            self._unread = "" if self._is_last else self._unread
            return False
        self._where = "text"
        return True

    def _drop(self) -> bool:
        self._unread = ""
        return False

    # What comes out

    def _say(self, text: str) -> None:
        """Text that is no call; blanks at its end wait for what follows."""
        text = self._blanks + text
        if self._follows_call and not self._has_text:
            text = text.lstrip(BLANKS)
        inner = text.rstrip(BLANKS)
        self._blanks = text[len(inner) :]
        if inner:
            self._has_text = True
            self._follows_call = False
            self._may_be_bare = False
            self._pieces.append(Text(inner))

    def _begin_call(self, name: str) -> None:
        self._blanks = ""
        self._pieces.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def _give_whole_call(self) -> bool:
        """Gives out a call that is whole; False where the object is none."""
        try:
            call = json.loads(self._object.text)
        except (ValueError, RecursionError):
            return False
        arguments = call.get(self._style.arguments)
        name = call.get("name")
        if not isinstance(name, str) or name not in self._functions or not isinstance(arguments, dict):
            return False
        self._begin_call(name)
        start, end = self._object.spans[self._style.arguments]
        self._pieces.append(Arguments(self.num_calls - 1, self._object.text[start:end]))
        return True

    def _give_arguments(self) -> None:
        """Gives out what is there of the arguments, once the name is known."""
        spans, text = self._object.spans, self._object.text
        if self._style.arguments not in spans or spans.get("name", (0, None))[1] is None:
            return
        start, end = spans[self._style.arguments]
        if self._num_given is None:
            self._begin_call(json.loads(text[slice(*spans["name"])]))
            self._num_given = 0
        new = text[start + self._num_given : end]
        if new:
            self._num_given += len(new)
            self._pieces.append(Arguments(self.num_calls - 1, new))


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of ``text`` with which ``opening`` begins."""
    for length in range(min(len(text), len(opening) - 1), 0, -1):
        if opening.startswith(text[-length:]):
            return length
    return 0
