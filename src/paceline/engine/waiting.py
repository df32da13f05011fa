"""The queue: requests in the order in which they came, a line for each share."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain

from paceline.engine.request import Request


class WaitingQueue:
    """Lines of requests that wait, one a share: who is at the end of a long line delays nobody in another."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Request]] = {}
        self._last_turns: dict[str, int] = {}  # of every share that has ever had one
        self._num_turns = 0
        self._length = 0  # kept: lines must not be counted by other threads while they come and go

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return self._length > 0

    def __iter__(self) -> Iterator[Request]:
        """All requests, line by line."""
        return chain.from_iterable(self._lines.values())

    def append(self, request: Request) -> None:
        """Puts a request at the end of its line."""
        self._lines.setdefault(request.share, deque()).append(request)
        self._length += 1

    def appendleft(self, request: Request) -> None:
        """Puts a request, which has run before, at the front of its line."""
        self._lines.setdefault(request.share, deque()).appendleft(request)
        self._length += 1

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        line = self._lines[request.share]
        line.remove(request)
        self._length -= 1
        if not line:
            del self._lines[request.share]

    def admit(self, request: Request) -> None:
        """Takes a request out whose turn it is."""
        self.remove(request)
        self._last_turns[request.share] = self._num_turns
        self._num_turns += 1

    def next_line(self, running: Sequence[Request]) -> deque[Request]:
        """The line whose turn it is: its share has the fewest ``running`` requests; of equals, the one whose last turn
        was longest ago. So a share that runs nothing waits for at most one request of each other share. The line must
        not be changed, the queue not be empty."""
        lines = self._lines
        if len(lines) == 1:
            return next(iter(lines.values()))
        counts = Counter([request.share for request in running])
        share = min(lines, key=lambda share: (counts[share], self._last_turns.get(share, -1)))
        return lines[share]
