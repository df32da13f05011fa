"""Waiting for requests: until all have ended, or piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType

from paceline.engine.engine import Update
from paceline.engine.outputs import Completion, Delta
from paceline.engine.request import Request
from paceline.engine.runner import EngineRunner


class Gathering:
    """A sink that keeps completions and calls ``when_done``, in the engine's thread, after that of the last request."""

    def __init__(self, requests: Sequence[Request], when_done: Callable[[], object]) -> None:
        self._requests = requests
        self._completions: dict[Request, Completion] = {}
        self._when_done = when_done

    def __call__(self, update: Update) -> None:
        if update.completion is not None:
            self._completions[update.request] = update.completion
            if len(self._completions) == len(self._requests):
                self._when_done()

    def completions(self) -> list[Completion]:
        """The completions, in the order of the requests."""
        return [self._completions[request] for request in self._requests]


def gather(runner: EngineRunner, requests: Sequence[Request]) -> list[Completion]:
    """The completions of requests, all submitted at once; an interrupt while it waits aborts them."""
    done = threading.Event()
    gathering = Gathering(requests, done.set)
    if requests:
        try:
            runner.submit(requests, gathering)
            done.wait()
        except BaseException:  # KeyboardInterrupt
            runner.abort(requests)
            raise
    return gathering.completions()


class Submission:
    """What was asked for by ``LLM.submit``."""

    def __init__(self, runner: EngineRunner, requests: Sequence[Request]) -> None:
        self._runner = runner
        self._requests = requests

    def abort(self) -> None:
        """Ends what has not ended before the next step; its sink hears of it. Does not wait."""
        self._runner.abort(self._requests)


class DeltaStream(Iterator[Delta]):
    """The pieces of the answers to one prompt, as they come.

    Closing it, leaving its ``with`` block, or dropping it aborts what still runs; so does an interrupt while waiting.
    An error of a request is raised in place of its last piece. ``owner`` is kept alive until the stream has ended: an
    LLM that nobody else holds would otherwise close its engine under it.
    """

    def __init__(self, runner: EngineRunner, requests: Sequence[Request], owner: object = None) -> None:
        self._num_open = len(requests)  # set first: an interrupt during submission must abort what was submitted
        self._runner = runner
        self._owner = owner
        self._requests = requests
        self._updates: SimpleQueue[Update] = SimpleQueue()
        runner.submit(requests, self._updates.put)  # the queue's method, not ours: a dropped stream must be collectable

    def __next__(self) -> Delta:
        if self._num_open <= 0:
            self._owner = None
            raise StopIteration
        try:
            update = self._updates.get()
        except BaseException:  # KeyboardInterrupt
            self.close()
            raise
        if update.completion is not None:
            if self._num_open > 0:  # closed from another thread while this one waited: 0 stays 0
                self._num_open -= 1
            if update.completion.error is not None:
                self.close()
                raise update.completion.error
        assert update.delta is not None
        return update.delta

    def close(self) -> None:
        """Aborts what still runs. May be called again."""
        if self._num_open:
            self._num_open = 0
            self._runner.abort(self._requests)

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
