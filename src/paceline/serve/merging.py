"""Several streams of answers read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from paceline.engine.outputs import Delta
from paceline.serve.bridge import AnswerStream


async def merged(
    streams: Sequence[AnswerStream], timeout_s: float | None = None
) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """The number of a stream and what came of it, whichever has something, until all have ended; no deltas where
    nothing came for ``timeout_s``. Does not close the streams."""
    if len(streams) == 1:  # without tasks: this is how nearly all requests come
        while streams[0].is_open:
            yield 0, await streams[0].next(timeout_s)
        return
    reading = {asyncio.ensure_future(stream.next()): number for number, stream in enumerate(streams)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield 0, []
            for task in sorted(done, key=reading.__getitem__):
                number = reading.pop(task)
                if streams[number].is_open:
                    reading[asyncio.ensure_future(streams[number].next())] = number
                yield number, task.result()
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
