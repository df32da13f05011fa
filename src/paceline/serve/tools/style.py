"""How models write calls of functions in their text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallStyle:
    """A call is a JSON object with the function's name and its arguments.

    opening        text that announces a call
    closing        text that may follow one, and belongs to it
    arguments      key of the arguments
    before, after  what stands around the object where a call is written out
    between        what stands between two calls
    is_bare        whether an answer that begins with an object, or goes on with one after a call, needs no opening
    """

    name: str
    opening: str
    closing: str
    arguments: str
    before: str = ""
    after: str = ""
    between: str = ""
    is_bare: bool = False

    def head(self, function: str) -> str:
        """A call up to its arguments, as it is written out."""
        return f'{self.before}{{"name": "{function}", "{self.arguments}": '

    def tail(self) -> str:
        """What follows the arguments."""
        return "}" + self.after
