"""How a server listens, whom it lets in, and how much it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import ParameterError

LogFormat = Literal["json", "text", "off"]


@dataclass(frozen=True)
class ServeSettings:
    """Validated on construction.

    host, port         address to listen on; port 0 takes a free one
    served_name        the model's name in requests and answers, None = as it was asked for
    api_key_file       one key a line (``name: key`` or the key alone), None = everybody is let in
    allow_origins      web origins whose pages may call the API, ("*",) = all; none unless asked
    max_body_bytes     longest request body
    max_header_bytes   longest request line and headers
    header_s, body_s   time that they may take to arrive
    send_s             time in which a client must take some of what is sent, or its connection is closed
    max_prompt_tokens  longest prompt, None = what the context holds
    max_choices        largest ``n``
    max_stop           most stop strings
    max_logprobs       most alternatives for a token
    max_prompts        most prompts in one request (completions, embeddings)
    max_connections    connections at a time, more are answered 503
    request_timeout_s  longest that an answer may take, None = any
    shutdown_s         time that running answers get after SIGTERM
    ping_s             silence after which a stream carries a comment, so that nothing on the way gives up on it
    max_stall_s        time without progress from which a server that has work is not ready
    log_format         of the line that a request leaves on standard error: json, text, or off for none
    metrics_by_client  whether metrics have a label for the key's name
    otel               whether each request becomes a span, which goes where OpenTelemetry's variables say
    coalesce_ms        least time between two chunks of one stream, but for its first and its end
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_key_file: str | None = None
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 2**16
    header_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 60.0
    max_prompt_tokens: int | None = None
    max_choices: int = 16
    max_stop: int = 16
    max_logprobs: int = 20
    max_prompts: int = 256
    max_connections: int = 1024
    request_timeout_s: float | None = None
    shutdown_s: float = 30.0
    ping_s: float = 10.0
    coalesce_ms: float = 40.0
    log_format: LogFormat = "text"
    max_stall_s: float = 60.0
    metrics_by_client: bool = False
    otel: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_bytes", 1, 2**40),
            ("max_header_bytes", 1024, 2**24),
            ("max_choices", 1, 128),
            ("max_stop", 0, 1024),
            ("max_logprobs", 0, 64),
            ("max_prompts", 1, 2**20),
            ("max_connections", 1, 2**20),
        ):
            _check_integer(name, getattr(self, name), low, high)
        if not isinstance(self.host, str) or not self.host:
            raise ParameterError("host", self.host, "a name or an address")
        for name in ("served_name", "api_key_file"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ParameterError(name, value, "text")
        origins = self.allow_origins
        if not isinstance(origins, tuple) or not all(isinstance(origin, str) for origin in origins):
            raise ParameterError("allow_origins", origins, "a tuple of web origins such as https://example.org, or *")
        if self.log_format not in get_args(LogFormat):
            raise ParameterError("log_format", self.log_format, f"one of {', '.join(get_args(LogFormat))}")
        for name in ("metrics_by_client", "otel"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "true or false")
        if self.max_prompt_tokens is not None:
            _check_integer("max_prompt_tokens", self.max_prompt_tokens, 1, 2**30)
        for name in (
            "header_s",
            "body_s",
            "send_s",
            "shutdown_s",
            "ping_s",
            "coalesce_ms",
            "max_stall_s",
            "request_timeout_s",
        ):
            value = getattr(self, name)
            if name == "request_timeout_s" and value is None:
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ParameterError(name, value, "a number of at least 0")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(name, value, f"a whole number between {low} and {high}")
