"""From the engine's thread to the event loop: answers as streams of deltas.

The engine never waits for a reader. What a reader has not taken yet is merged, so a slow one gets fewer and longer
pieces, and holds no more than its own answer. However many streams a step feeds, the loop is woken once; and while many
are open, each is handed what has come at intervals, since a chunk costs the loop as much as a step may take.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

from paceline.engine.detokenize import merge_pieces
from paceline.engine.engine import Update
from paceline.engine.outputs import Completion, Delta, TokenLogprob
from paceline.engine.stream import Submission
from paceline.errors import RequestTimeoutError
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.serve.keys import Client


class Bridge:
    """Wakes streams of one event loop from the engine's thread; of each stream, two pieces are ``coalesce_s`` apart."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, coalesce_s: float = 0.0) -> None:
        self.coalesce_s = coalesce_s
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

    def __init__(
        self,
        bridge: Bridge,
        on_read: Callable[[list[Delta]], object] = lambda deltas: None,
        *,
        limit_s: float | None = None,
    ) -> None:
        """``on_read`` hears what ``next`` returns. Answers that have not ended after ``limit_s`` end then, each with a
        ``RequestTimeoutError``, even if the engine hangs."""
        self._on_read = on_read
        self._bridge = bridge
        self._limit_s = limit_s
        self._deadline_s = math.inf
        self._updates: deque[Update] = deque()
        self._has_end = False  # among the updates; set in the engine's thread
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False
        self._last_s = -math.inf  # when something was handed over
        self._submission: Submission | None = None
        self._num_prompt = 0
        self._open: set[int] = set()  # choices

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
        self._num_prompt = len(prompt)
        self._open = set(range(params.n))
        if self._limit_s is not None:
            self._deadline_s = asyncio.get_running_loop().time() + self._limit_s

    def _feed(self, update: Update) -> None:
        """The engine's thread: keeps an update."""
        self._updates.append(update)
        if update.completion is not None:
            self._has_end = True
        if self._has_end or not self._waits_for_end:  # else its timer wakes it, and the loop can sleep on
            self._bridge.notify(self)

    def wake(self) -> None:
        """The loop: something has come."""
        if self._waiter is not None and (self._has_end or not self._waits_for_end):
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_open(self) -> bool:
        """Whether more will come."""
        return bool(self._open)

    async def next(self, timeout_s: float | None = None) -> list[Delta]:
        """What has come since the last call, one delta a choice (and its end, where the time is up). Waits for
        something; empty after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        early_s = self._last_s + self._bridge.coalesce_s - loop.time()
        if early_s > 0 and not self._has_end:
            await self._wait(early_s, for_end=True)
        if not self._updates:
            await self._wait(timeout_s)
        deltas = self._taken()
        if loop.time() >= self._deadline_s and self._open:  # what came in time is no less an answer for being read late
            deltas += self._timed_out()
        self._last_s = loop.time()
        self._on_read(deltas)
        return deltas

    async def _wait(self, timeout_s: float | None, *, for_end: bool = False) -> None:
        """Until something comes (or, ``for_end``, an answer's end), the time is up, or the deadline."""
        loop = asyncio.get_running_loop()
        self._waiter, self._waits_for_end = loop.create_future(), for_end
        if self._has_end or (self._updates and not for_end):  # came before the engine's thread could see who waits
            self._stop_waiting()
        until_s = self._deadline_s if timeout_s is None else min(self._deadline_s, loop.time() + timeout_s)
        timer = None if until_s == math.inf else loop.call_at(until_s, self._stop_waiting)
        try:
            await self._waiter
        finally:
            self._waiter, self._waits_for_end = None, False
            if timer is not None:
                timer.cancel()

    def _taken(self) -> list[Delta]:
        """All that has come, merged."""
        self._has_end = False  # first: what comes meanwhile is taken, or sets it again
        found: dict[int, list[Delta]] = {}
        while self._updates:
            update = self._updates.popleft()
            delta = update.delta or _whole(update)
            found.setdefault(delta.index, []).append(delta)
            if update.completion is not None:
                self._open.discard(delta.index)
        return [_joined(found[index]) for index in sorted(found)]

    def _timed_out(self) -> list[Delta]:
        """The ends of all open answers."""
        assert self._limit_s is not None
        error = RequestTimeoutError(self._limit_s)
        ends = [Completion("", [], "error", self._num_prompt, error=error) for _ in self._open]
        deltas = [Delta("", [], "error", index, end) for index, end in zip(sorted(self._open), ends, strict=True)]
        self.close()
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
        if self._open and self._submission is not None:
            self._submission.abort()
        self._open.clear()


def _whole(update: Update) -> Delta:
    """The end of a request that does not stream, as a delta without text."""
    completion = update.completion
    assert completion is not None
    return Delta("", completion.token_ids, completion.finish_reason, update.request.choice, completion)


def _joined(deltas: list[Delta]) -> Delta:
    """Deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    logprobs: list[TokenLogprob] | None = None
    if all(delta.logprobs is not None for delta in deltas):
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return Delta(
        "".join([delta.text for delta in deltas]),
        [token for delta in deltas for token in delta.token_ids],
        last.finish_reason,
        last.index,
        last.completion,
        logprobs,
        merge_pieces([piece for delta in deltas for piece in delta.pieces]),
    )
