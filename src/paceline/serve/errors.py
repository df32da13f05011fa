"""What an error looks like to an HTTP client: status, headers and body."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.stats import EngineStats
from paceline.errors import (
    CapacityError,
    KVCapacityError,
    OverloadError,
    PacelineError,
    ParameterError,
    RequestError,
    RequestTimeoutError,
    UnsupportedError,
)


class HTTPError(Exception):
    """An answer that is an error: raised by a handler, sent by the app."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status, message, kind, param, code, headers or {})


@dataclass(frozen=True)
class Problem:
    """``kind`` is OpenAI's ``type``."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The body, in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


RETRY_AFTER_S = 1


def too_long(message: str, field: str) -> HTTPError:
    """400 for a prompt that does not fit; ``field`` of the request holds it."""
    return HTTPError(400, message, param=field, code="context_length_exceeded")


INTERNAL_ERROR = "internal_error"
"""The code of what no client caused."""

LONGEST_RETRY_AFTER_S = 60


def drain_s(stats: EngineStats, num_waiting: int) -> int:
    """Whole seconds after which a full queue is worth another try: the time that those who wait will take, at what a
    request has taken of the engine so far. At least 1, at most 60, since they may also leave."""
    busy_s = stats.python_s + stats.draft_s + stats.executor_s
    seconds = num_waiting * busy_s / max(1, stats.requests_finished)
    return min(LONGEST_RETRY_AFTER_S, max(RETRY_AFTER_S, math.ceil(seconds)))


def problem_of(error: BaseException) -> Problem:
    """What a client is told of ``error``. Of a bug of ours it learns the kind alone; the log has the rest."""
    if isinstance(error, HTTPError):
        return error.problem
    if isinstance(error, ParameterError):
        return Problem(400, str(error), "invalid_request_error", error.field, "invalid_value")
    if isinstance(error, OverloadError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return Problem(429, str(error), "rate_limit_error", None, "queue_full", headers)
    if isinstance(error, KVCapacityError):
        return Problem(400, str(error), "invalid_request_error", None, "context_length_exceeded")
    if isinstance(error, UnsupportedError):
        return Problem(400, str(error), "invalid_request_error", None, "unsupported")
    if isinstance(error, RequestTimeoutError):
        return Problem(504, str(error), "server_error", None, "timeout")
    if isinstance(error, RequestError):
        return Problem(500, str(error), "server_error", None, "request_failed")
    if isinstance(error, CapacityError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return Problem(503, str(error), "server_error", None, "no_capacity", headers)
    if isinstance(error, PacelineError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return Problem(503, str(error), "server_error", None, "engine_unavailable", headers)
    return Problem(500, f"internal error ({type(error).__name__})", "server_error", None, INTERNAL_ERROR)
