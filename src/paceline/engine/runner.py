"""The thread that owns an engine: requests go in from any thread, updates come out through sinks."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from paceline.engine.engine import Engine, Update
from paceline.engine.outputs import Delta
from paceline.engine.request import Request
from paceline.errors import EngineStoppedError, PacelineError

Sink = Callable[[Update], object]
"""Called in the engine's thread with each update of a request: must be quick. One that raises aborts its request."""


class EngineRunner:
    """Runs an engine's steps in one thread, which starts with the first request. While there is no work it writes the
    prefix cache to its store, if it has one, and then sleeps.

    Only that thread touches the engine, so no step is ever interrupted half way, whatever happens to the threads that
    wait.
    """

    def __init__(
        self,
        engine: Engine,
        on_end: Callable[[], object] = lambda: None,
        *,
        on_broken: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_end`` is called once the engine takes no more steps, in its thread if it has one; ``on_broken`` after
        that when an error outside any request ended it."""
        self.engine = engine
        self._on_end = on_end
        self._on_broken = on_broken
        self._process = os.getpid()
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._sinks: dict[Request, Sink] = {}
        self._lock = threading.RLock()  # guards the four below; a collected stream may abort while this thread holds it
        self._num_open: Counter[str] = Counter()  # submitted and not ended, of each share
        self._thread: threading.Thread | None = None
        self._closed = False
        self._broken: EngineStoppedError | None = None

    @property
    def is_broken(self) -> bool:
        """Whether an error outside any request has ended it. Those who wait have heard of it or soon do."""
        return self._broken is not None

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Queues requests of one share, all before the same step; ``sink`` gets each one's updates, the last with a
        completion.

        Raises ``OverloadError``, and queues none, when the queue has no room for all.
        """
        if os.getpid() != self._process:
            raise PacelineError(
                "this LLM was loaded before a fork; its threads do not exist here: load it in the child"
            )
        with self._lock:
            if self._broken is not None:
                raise EngineStoppedError(self._broken.__cause__ or self._broken)
            if self._closed:
                raise PacelineError("this LLM is closed")
            share = requests[0].share if requests else ""
            self._check_room(share, len(requests))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="paceline-engine", daemon=True)
                self._thread.start()
            self._num_open[share] += len(requests)
            self._commands.put(lambda: self._add(requests, sink))

    def check_room(self, share: str, num_new: int) -> None:
        """Raises ``OverloadError`` when ``submit`` would, for so many requests of a share."""
        with self._lock:
            self._check_room(share, num_new)

    def _check_room(self, share: str, num_new: int) -> None:
        num_of_share = self._num_open[share]
        num_open = self._num_open.total()
        self.engine.check_room(share, num_new, num_open=num_open, num_open_of_share=num_of_share)

    def abort(self, requests: Sequence[Request]) -> None:
        """Ends the requests that have not ended, before the next step; their sinks get a last update. Does not wait."""
        with self._lock:
            if self._thread is not None and not self._closed:
                self._commands.put(lambda: self._abort(requests))

    def close(self) -> None:
        """Aborts what is left and ends the thread. May be called again."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            thread = self._thread
            self._commands.put(None)
        if thread is None:
            if not was_closed:
                self._on_end()
        elif thread is not threading.current_thread():
            thread.join()

    def _add(self, requests: Sequence[Request], sink: Sink) -> None:
        with self._lock:
            for request in requests:
                self._sinks[request] = sink
                self.engine.scheduler.add(request)

    def _abort(self, requests: Sequence[Request]) -> None:
        if self._broken is not None:
            return
        for request in requests:
            if request not in self._sinks:  # ended, or its submission was interrupted before it was queued
                continue
            update = self.engine.abort(request)
            if update is not None:
                self._deliver(update)

    def _deliver(self, update: Update) -> None:
        request = update.request
        sink = self._sinks[request] if update.completion is None else self._forget(request)
        try:
            sink(update)
        except Exception:  # the one who waited is gone (a closed event loop): nobody wants the rest
            if request in self._sinks:
                self._forget(request)
            if self._broken is None:
                self.engine.abort(request)

    def _forget(self, request: Request) -> Sink:
        with self._lock:
            self._num_open[request.share] -= 1
            if not self._num_open[request.share]:
                del self._num_open[request.share]
            return self._sinks.pop(request)

    def _loop(self) -> None:
        engine, commands = self.engine, self._commands
        try:
            while True:
                while not engine.has_work or not commands.empty():
                    if not engine.has_work and commands.empty() and engine.persist():
                        continue
                    command = commands.get()
                    if command is None:
                        self._abort(list(self._sinks))
                        while engine.persist():
                            pass
                        return
                    command()
                for update in engine.step():
                    self._deliver(update)
        # A bug of ours, or a panic in a library, which is no Exception: those who wait must hear of it.
        except BaseException as error:
            stopped = EngineStoppedError(error)
            with self._lock:
                self._broken = stopped
                while not commands.empty():
                    pending = commands.get()
                    if pending is not None:
                        pending()
            for request in list(self._sinks):
                self._deliver(_broken_update(request, EngineStoppedError(error)))
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._on_end()
        finally:
            if self._broken is not None:
                self._on_broken()


def _broken_update(request: Request, error: EngineStoppedError) -> Update:
    request.finish_reason = "error"
    request.error = error
    completion = request.completion()
    delta = Delta("", [], "error", request.choice, completion) if request.streaming else None
    return Update(request, delta, completion)
