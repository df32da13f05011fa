"""How models write calls of functions in their text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallStyle:
    """A call is a JSON object with the function's name and its arguments.

    opening    text that announces a call
    closing    text that may follow one, and belongs to it
    is_bare    whether an answer that begins with an object, or goes on with one after a call, needs no opening; calls
               are then written out without opening and closing
    arguments  key of the arguments
    margin     what stands on both sides of the object where a call is written out
    between    what stands between two calls
    """

    name: str
    opening: str
    closing: str
    is_bare: bool
    arguments: str
    margin: str
    between: str

    @property
    def written_opening(self) -> str:
        """The opening where a call is written out."""
        return "" if self.is_bare else self.opening

    def head(self, function: str) -> str:
        """A call from the opening up to its arguments, as it is written out."""
        return f'{self.margin}{{"name": "{function}", "{self.arguments}": '

    def tail(self) -> str:
        """What follows the arguments."""
        return "}" + self.margin + ("" if self.is_bare else self.closing)

    def call(self, function: str, arguments: str) -> str:
        """A whole call; ``arguments`` is JSON."""
        return self.written_opening + self.head(function) + arguments + self.tail()
