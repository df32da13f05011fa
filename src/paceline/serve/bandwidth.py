"""How fast this machine reads memory, measured once, while nobody waits for the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.llm import LLM

Probe = Callable[[int], float]
"""Threads -> GB/s."""


def native_probe(num_threads: int) -> float:
    """Reads 256 MB a few times with that many threads: about a fifth of a second."""
    from paceline import _native

    return float(_native.measure_bandwidth(num_threads))


class Bandwidth:
    """Unknown until somebody asks for it while the engine is idle: a server that nobody watches never measures."""

    def __init__(self, probe: Probe = native_probe) -> None:
        self.bytes_per_s: float | None = None
        self._probe = probe
        self._thread: threading.Thread | None = None

    def measure_if_idle(self, llm: LLM) -> None:
        """Begins to measure in a thread of its own, unless that was done or a request is there. Does not wait."""
        stats = llm.stats()
        if self._thread is None and stats.num_running == stats.num_waiting == 0:
            num_threads = int(llm.path()["threads"])
            self._thread = threading.Thread(target=self._measure, args=(num_threads,), name="paceline-bandwidth")
            self._thread.start()

    def wait(self) -> None:
        """Until what was begun is done."""
        if self._thread is not None:
            self._thread.join()

    def _measure(self, num_threads: int) -> None:
        self.bytes_per_s = self._probe(num_threads) * 1e9
