"""Who looks on while requests are served."""

from __future__ import annotations

import time
from collections.abc import Iterable

from paceline.serve.exchange import CLIENT_LEFT, Exchange


class Watch:
    """Hears of every request; this one cares for nothing. Called on the event loop, so it must be quick."""

    def chunk(self, exchange: Exchange, num_tokens: int, now_s: float) -> None:
        """So many new tokens were handed to the socket; ``exchange.last_sent_s`` is still when it was handed others."""

    def ended(self, exchange: Exchange) -> None:
        """A request has ended, one way or another. Nothing of it changes any more."""


class Watches:
    """All of one server."""

    def __init__(self, watches: Iterable[Watch]) -> None:
        self._watches = list(watches)

    def add(self, watch: Watch) -> None:
        """One more, who hears what happens from now on."""
        self._watches.append(watch)

    def sent(self, exchange: Exchange) -> None:
        """The socket was handed a part of an answer."""
        num_tokens, exchange.num_unsent_tokens = exchange.num_unsent_tokens, 0
        if num_tokens == 0:
            return
        now_s = time.perf_counter()
        for watch in self._watches:
            watch.chunk(exchange, num_tokens, now_s)
        exchange.last_sent_s = now_s
        if exchange.first_sent_s is None:
            exchange.first_sent_s = now_s

    def ended(self, exchange: Exchange, status: int, *, is_complete: bool) -> None:
        """Nothing more is sent."""
        exchange.ended_s = time.perf_counter()
        exchange.status = status if is_complete else CLIENT_LEFT
        for watch in self._watches:
            watch.ended(exchange)
