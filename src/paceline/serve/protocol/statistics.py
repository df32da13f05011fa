"""The state of a server on the wire."""

from __future__ import annotations

from pydantic import Field

from paceline.serve.protocol.wire import WireAnswer


class Percentiles(WireAnswer):
    p50: float
    p95: float


class Statistics(WireAnswer):
    """Now, or in a window: ``window_s`` before this answer, at most a minute once the server was asked before, and else
    since it started."""

    model: str
    uptime_s: float
    running: int = Field(description="requests with pages")
    waiting: int = Field(description="requests without pages")
    kv_use: float = Field(description="pages that requests hold over all pages, 0 to 1")
    kv_cached: float = Field(description="pages that only the prefix cache holds over all pages, 0 to 1")
    tokens_per_s: float | None = Field(
        description="tokens drawn for all requests a second, over the last few seconds; null at the first look"
    )
    window_s: float
    prefix_hit_rate: float | None = Field(description="prompt tokens found in the prefix cache, 0 to 1, in the window")
    acceptance: float | None = Field(
        description="draft tokens accepted over those verified, 0 to 1, in the window; null without any"
    )
    read_gb_s: float | None = Field(
        description="weights, keys and values read a second of steps, 10^9 B, in the window"
    )
    bandwidth_gb_s: float | None = Field(
        description="what this machine reads from memory at most, measured once while nobody waited; null before"
    )
    ttft_s: Percentiles | None = Field(description="arrival to first token, requests of the last minute")
    tpot_s: Percentiles | None = Field(description="time of a further token, answers of the last minute")
    progress_age_s: float = Field(description="since the engine got on while it had work; 0 without")
    restarts: int = Field(description="times that the engine was made anew after a failure")
    memory_bytes: int = Field(description="of the process")
    path: dict[str, str | int] = Field(description="what really runs: isa, threads, weights, kv_dtype, speculation")
