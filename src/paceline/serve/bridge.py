"""From the engine's thread to the event loop: answers as streams of deltas.

The engine never waits for a reader. What a reader has not taken yet is merged, so a slow one gets fewer and longer
pieces, and holds no more than its own answer. However many streams a step feeds, the loop is woken once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from paceline.engine.detokenize import merge_pieces
from paceline.engine.engine import Update
from paceline.engine.outputs import Completion, Delta
from paceline.llm import LLM, Submission
from paceline.params import SamplingParams
from paceline.serve.keys import Client


class Bridge:
    """Wakes streams of one event loop from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fed: deque[AnswerStream] = deque()
        self._is_woken = False

    def notify(self, stream: AnswerStream) -> None:
        """Has the loop look after a stream; from any thread. Raises RuntimeError once the loop is closed."""
        self._fed.append(stream)
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_woken = False  # before the queue is emptied: what comes now wakes the loop once more
        while self._fed:
            self._fed.popleft().wake()


class AnswerStream:
    """The answers to one prompt, piece by piece. Belongs to one task of the loop.

    ``close`` aborts what still runs; it is due however the reading ends.
    """

    def __init__(self, bridge: Bridge, on_read: Callable[[list[Delta]], object] = lambda deltas: None) -> None:
        """``on_read`` hears what ``next`` returns."""
        self._on_read = on_read
        self._bridge = bridge
        self._updates: deque[Update] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._submission: Submission | None = None
        self._num_open = 0

    def start(
        self,
        llm: LLM,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        client: Client,
        streaming: bool,
        embed: bool = False,
    ) -> None:
        """Asks for a client. Raises what ``LLM.submit`` raises."""
        self._submission = llm.submit(
            prompt,
            params,
            self._feed,
            cache_domain=client.cache_domain,
            share=client.name,
            streaming=streaming,
            embed=embed,
        )
        self._num_open = params.n

    def _feed(self, update: Update) -> None:
        """The engine's thread: keeps an update."""
        self._updates.append(update)
        self._bridge.notify(self)

    def wake(self) -> None:
        """The loop: something has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_open(self) -> bool:
        """Whether more will come."""
        return self._num_open > 0

    async def next(self, timeout_s: float | None = None) -> list[Delta]:
        """What has come since the last call, one delta a choice; waits for something. Empty after ``timeout_s``."""
        if not self._updates:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self.wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        merged: dict[int, Delta] = {}
        while self._updates:
            update = self._updates.popleft()
            self._num_open -= update.completion is not None
            delta = update.delta or _whole(update)
            before = merged.get(delta.index)
            merged[delta.index] = delta if before is None else _joined(before, delta)
        deltas = [merged[index] for index in sorted(merged)]
        self._on_read(deltas)
        return deltas

    async def completions(self) -> list[Completion]:
        """All answers, by choice, once the last has ended."""
        found: dict[int, Completion] = {}
        while self.is_open:
            for delta in await self.next():
                if delta.completion is not None:
                    found[delta.index] = delta.completion
        return [found[index] for index in sorted(found)]

    def close(self) -> None:
        """Aborts what still runs. May be called again."""
        if self._num_open > 0 and self._submission is not None:
            self._submission.abort()
        self._num_open = 0


def _whole(update: Update) -> Delta:
    """The end of a request that does not stream, as a delta without text."""
    completion = update.completion
    assert completion is not None
    return Delta("", completion.token_ids, completion.finish_reason, update.request.choice, completion)


def _joined(first: Delta, second: Delta) -> Delta:
    logprobs = None if first.logprobs is None or second.logprobs is None else [*first.logprobs, *second.logprobs]
    return Delta(
        first.text + second.text,
        [*first.token_ids, *second.token_ids],
        second.finish_reason,
        second.index,
        second.completion,
        logprobs,
        merge_pieces([*first.pieces, *second.pieces]),
    )
