"""What many exchanges amount to: percentiles, rates, goodput, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.errors import ParameterError
from paceline.measure.serving.exchange import LATENCIES, Exchange


@dataclass(frozen=True)
class Limits:
    """What an answer must keep to count for goodput, in milliseconds; None leaves a latency free. ``gap_ms`` bounds
    every gap of the answer."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ParameterError(name, value, "a limit is a number of milliseconds above 0")

    @property
    def are_given(self) -> bool:
        """Whether there is any."""
        return any(value is not None for value in asdict(self).values())

    def met_by(self, exchange: Exchange) -> bool:
        """Whether the exchange has an answer that keeps all of them. A latency that it lacks (the TPOT of one token)
        keeps any limit."""
        pairs = (
            (self.ttft_ms, "ttft"),
            (self.tpot_ms, "tpot"),
            (self.gap_ms, "chunk_gap"),
            (self.e2e_ms, "e2e"),
        )
        return exchange.succeeded and all(
            limit_ms is None or all(1e3 * value_s <= limit_ms for value_s in LATENCIES[key].values_s(exchange))
            for limit_ms, key in pairs
        )


def distribution_ms(values_s: Sequence[float]) -> dict[str, float | int | None]:
    """Mean, percentiles (interpolated between neighbours) and extremes in milliseconds; None where there is no
    value."""
    names = ("mean", "p50", "p95", "p99", "min", "max")
    if not values_s:
        return {"count": 0, **dict.fromkeys(names)}
    values_ms = 1e3 * np.asarray(values_s, np.float64)
    p50, p95, p99 = np.percentile(values_ms, (50, 95, 99))
    figures = (values_ms.mean(), p50, p95, p99, values_ms.min(), values_ms.max())
    return {"count": len(values_s), **{name: float(figure) for name, figure in zip(names, figures, strict=True)}}


def figures(exchanges: Sequence[Exchange], *, wall_s: float, limits: Limits) -> dict[str, Any]:
    """The figures as plain data. Latencies, tokens and rates are of requests that succeeded; all others are counted
    under ``requests`` and ``errors``."""
    answered = [one for one in exchanges if one.succeeded]
    failed = [one.failure for one in exchanges if one.failure is not None]
    output_tokens = sum(one.output_tokens for one in answered)
    prompt_tokens = sum(one.prompt_tokens or 0 for one in answered)

    def rate(amount: float) -> float:
        return amount / wall_s if wall_s > 0 else 0.0

    rates = {
        "output_tokens_per_s": rate(output_tokens),
        "total_tokens_per_s": rate(output_tokens + prompt_tokens),
        "requests_per_s": rate(len(answered)),
    }
    if limits.are_given:
        rates["goodput_requests_per_s"] = rate(sum(limits.met_by(one) for one in answered))
    return {
        "wall_s": wall_s,
        "requests": {
            "sent": len(exchanges),
            "succeeded": len(answered),
            "failed": len(failed),
            "unfinished": len(exchanges) - len(answered) - len(failed),
        },
        "errors": {
            kind: {"count": count, "example": next(one.message for one in failed if one.kind == kind)}
            for kind, count in Counter(one.kind for one in failed).most_common()
        },
        "latency_ms": {
            key: distribution_ms([value_s for one in answered for value_s in latency.values_s(one)])
            for key, latency in LATENCIES.items()
        },
        "rates": rates,
        "limits_ms": {name: value for name, value in asdict(limits).items() if value is not None},
        "tokens": {
            "prompt": prompt_tokens,
            "cached": sum(one.cached_tokens for one in answered),
            "output": output_tokens,
            "counted_by_usage": sum(one.reported_tokens is not None for one in answered),
            "counted_by_chunks": sum(one.reported_tokens is None for one in answered),
        },
    }


def lateness_s(exchanges: Sequence[Exchange]) -> list[float]:
    """How late an open loop sent each request; empty for a closed loop."""
    return [one.sent_s - one.due_s for one in exchanges if one.due_s is not None]
