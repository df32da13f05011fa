"""When to make a step of the kind that does not come by itself, so that its cost stays known.

What a step costs is learnt from pairs of steps of different sizes. Where every step verifies the same number of nodes,
none is seen without drafts, and a table that makes them look cheap is never corrected; where a table says that
nothing can pay, none is seen with them. So one is made on purpose, at gaps that double up to their largest; and soon
again when it came out better than the table said, because one pair moves the table only a little.
"""

from __future__ import annotations

SURPRISE = 0.1
"""Log-ratio of a step's time to the table, against that of the step before, from which the table is doubted."""


class Check:
    """Of one kind of steps: after ``first`` steps without one, at gaps of up to ``most``; after ``again`` while the
    table is doubted."""

    def __init__(self, first: int, most: int, again: int) -> None:
        self._first, self._most, self._again = first, most, again
        self._gap = first
        self._since = 0

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be of this kind."""
        return self._since >= self._gap

    def passed(self) -> None:
        """A step of the other kind."""
        self._since += 1

    def came(self) -> None:
        """One of this kind came by itself."""
        self._since, self._gap = 0, self._first

    def made(self, cheaper: float) -> None:
        """One was made on purpose; it was ``cheaper`` by that log-ratio than the table said."""
        self._since = 0
        self._gap = self._again if cheaper > SURPRISE else min(2 * self._gap, self._most)
