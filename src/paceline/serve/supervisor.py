"""Starts an engine again that has broken, so many times in so long a time and no more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from paceline.llm import LLM

log = logging.getLogger("paceline.serve")

MAX_RESTARTS = 3
RESTART_WINDOW_S = 300.0
"""An engine that breaks more often in this time breaks always: it stays so, and readiness tells whoever watches."""


class Supervisor:
    """Watches one LLM from the running event loop."""

    def __init__(self, llm: LLM, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_restarts = 0
        self.num_breaks = 0
        self._llm = llm
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._recent: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._restarting: asyncio.Task[None] | None = None
        llm.when_broken(self._notice)

    def _notice(self) -> None:
        """The engine's thread: has the loop look after it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is served any more
            self._loop.call_soon_threadsafe(self._consider)

    def _consider(self) -> None:
        self.num_breaks += 1
        now_s = self._clock()
        if len(self._recent) < MAX_RESTARTS or now_s - self._recent[0] > RESTART_WINDOW_S:
            self._recent.append(now_s)
            self._restarting = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        try:
            await asyncio.to_thread(self._llm.restart)
        except Exception as error:  # it stays broken, which readiness tells; why stands in the log
            log.error("the engine did not start again", exc_info=error)
        else:
            self.num_restarts += 1
