"""The events of a stream, whose end frees what feeds them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from paceline.serve.bridge import AnswerStream


class AnswerEvents(AsyncIterator[bytes]):
    """What a generator makes of some answers. What it raises is the server's to tell, in the form of the endpoint.

    ``aclose`` aborts the answers that still run. A generator alone would not do: one that has not begun yet, because
    the client left at once, runs nothing of its own when it is closed.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], streams: Sequence[AnswerStream]) -> None:
        self._events = events
        self._streams = streams

    async def __anext__(self) -> bytes:
        return await self._events.__anext__()

    async def aclose(self) -> None:
        """May be called again."""
        for stream in self._streams:
            stream.close()
        await self._events.aclose()
