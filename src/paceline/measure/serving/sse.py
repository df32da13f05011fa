"""Server-sent events out of pieces of bytes."""

from __future__ import annotations


class EventParser:
    """Collects bytes and gives the ``data`` of each event as soon as its blank line is there, however they are cut.

    Comments and other fields are passed over; lines may end in LF or CRLF.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events

    def close(self) -> list[bytes]:
        """The event that the end of the stream completes: servers that leave out the last blank line are many."""
        return self.feed(b"\n\n")
