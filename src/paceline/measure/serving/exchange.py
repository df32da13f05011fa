"""One request to a server and what came back, and the latencies that follow from its times.

Departures: other tools use the same words for other things. Here, with t0 sent, t1 first chunk, tn last chunk and n
output tokens: TTFT = t1 - t0, E2E = tn - t0, TPOT = (E2E - TTFT) / (n - 1), and a chunk gap is the time between two
chunks that carry text. ``NAMES`` says what others call them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer: a ``kind`` to count by (``http_429``, ``timeout``), and what was said."""

    kind: str
    message: str


@dataclass
class Exchange:
    """A request that was sent at ``sent_s`` and its answer, so far; all times are of one clock, in seconds.

    due_s          when an open loop meant to send it
    chunk_s        when each chunk with text arrived; those that one read of the socket brought have the same time
    finished_s     when the chunk with the finish reason arrived
    is_complete    whether the answer has ended as it should
    num_resent     how often it found a kept connection closed, and was sent on another; counts as part of its time
    """

    sent_s: float
    due_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    finished_s: float | None = None
    is_complete: bool = False
    failure: Failure | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    reported_tokens: int | None = None
    num_resent: int = 0

    @property
    def succeeded(self) -> bool:
        """Whether it has an answer, so that it has latencies."""
        return self.is_complete and self.failure is None

    @property
    def output_tokens(self) -> int:
        """By the server's ``usage``, or the number of chunks where it reports none."""
        return len(self.chunk_s) if self.reported_tokens is None else self.reported_tokens

    @property
    def first_s(self) -> float:
        """When the first chunk arrived; that of an empty answer is the one that ends it."""
        return min(self._ends_s(0))

    @property
    def last_s(self) -> float:
        """When the last token may have arrived: with the last text, or, if it has none, with the finish reason."""
        return max(self._ends_s(-1))

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.last_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers that have no second one."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def tpot_with_ttft_s(self) -> float | None:
        """The whole time, divided among all tokens; None for an answer without any."""
        return self.e2e_s / self.output_tokens if self.output_tokens else None

    @property
    def gaps_s(self) -> list[float]:
        """The times between chunks with text."""
        return [later - earlier for earlier, later in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    def _ends_s(self, at: int) -> list[float]:
        """The finish, and the chunk with text at that place."""
        ends_s = [] if self.finished_s is None else [self.finished_s]
        if self.chunk_s:
            ends_s.append(self.chunk_s[at])
        assert ends_s, "only answers that ended have latencies"
        return ends_s


@dataclass(frozen=True)
class Latency:
    """A kind of latency: its title, the values of one exchange, and its name in other tools."""

    title: str
    values_s: Callable[[Exchange], list[float]]
    names: dict[str, str]


def _optional(value: float | None) -> list[float]:
    return [] if value is None else [value]


LATENCIES = {
    "ttft": Latency(
        "TTFT", lambda one: [one.ttft_s], {"vllm": "TTFT", "guidellm": "TTFT", "aiperf": "time to first token"}
    ),
    "tpot": Latency(
        "TPOT", lambda one: _optional(one.tpot_s), {"vllm": "TPOT", "guidellm": "ITL", "aiperf": "inter token latency"}
    ),
    "chunk_gap": Latency("chunk gap", lambda one: one.gaps_s, {"vllm": "ITL", "aiperf": "inter chunk latency"}),
    "tpot_with_ttft": Latency("TPOT with TTFT", lambda one: _optional(one.tpot_with_ttft_s), {"guidellm": "TPOT"}),
    "e2e": Latency(
        "E2E", lambda one: [one.e2e_s], {"vllm": "E2EL", "guidellm": "request latency", "aiperf": "request latency"}
    ),
}
"""The kinds of latency that are reported, by their key in the document."""

NAMES = ("vllm", "guidellm", "aiperf")
"""Tools whose names for the latencies are known."""
