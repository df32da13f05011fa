"""A light client of OpenAI-compatible servers: streams one answer and notes when each chunk arrived."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace, TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from paceline.errors import EndpointError, ParameterError
from paceline.measure.serving.exchange import Exchange, Failure
from paceline.measure.serving.jobs import Job, MadeUp
from paceline.measure.serving.sse import EventParser

Api = Literal["chat", "completions"]

KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which uvicorn closes idle connections: one that is just being closed would fail a request
that the server never saw."""

LOST_CONNECTION = frozenset({"connection_failed", "connection_lost"})
"""Kinds of failure that a server which has gone gives."""

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what they all say.

    url      with or without the API's prefix: http://host:port means http://host:port/v1
    fields   of the body, beside model, prompt and max_tokens
    """

    url: str
    api: Api = "chat"
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    max_tokens: int = 128
    fields: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ParameterError("url", self.url, "an address such as http://127.0.0.1:8000")
        if not self.timeout_s > 0:
            raise ParameterError("timeout", self.timeout_s, "a number of seconds above 0")

    @property
    def base(self) -> str:
        """The address that paths of the API are appended to."""
        url = self.url.rstrip("/")
        return url if urlsplit(url).path else f"{url}/v1"

    @property
    def target(self) -> str:
        """Where requests are sent."""
        return f"{self.base}/chat/completions" if self.api == "chat" else f"{self.base}/completions"

    def body(self, job: Job) -> dict[str, Any]:
        """The request for a job that has a text."""
        assert not isinstance(job.prompt, MadeUp), "a made-up prompt must have got its words"
        prompt: dict[str, Any]
        if self.api == "chat":
            is_text = isinstance(job.prompt, str)
            prompt = {"messages": [{"role": "user", "content": job.prompt}] if is_text else list(job.prompt)}
        elif isinstance(job.prompt, str):
            prompt = {"prompt": job.prompt}
        else:
            prompt = {"prompt": "\n\n".join(str(message["content"]) for message in job.prompt)}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": self.max_tokens if job.max_tokens is None else job.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


class Client:
    """Connections to an endpoint, kept open between requests. A context manager; ``clock`` is in seconds."""

    def __init__(self, endpoint: Endpoint, *, clock: Callable[[], float] = perf_counter) -> None:
        self.endpoint = endpoint
        self.clock = clock
        headers = {"Accept": "text/event-stream"}
        if endpoint.key is not None:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            trace_configs=[tracing],
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=endpoint.timeout_s),
            headers=headers,
            auto_decompress=True,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """The models that the server names. Raises ``EndpointError``."""
        url = f"{self.endpoint.base}/models"
        try:
            async with self._session.get(url) as response:
                if response.status != 200:
                    failure = await _refusal(response)
                    raise EndpointError(url, f"{failure.kind}: {failure.message}")
                return [str(model["id"]) for model in json.loads(await response.read())["data"]]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            failure = _broken(error, has_begun=False)
            raise EndpointError(url, f"{failure.kind}: {failure.message}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointError(url, "does not list models as OpenAI's API does: name one with --model") from error

    async def ask(self, job: Job, exchange: Exchange) -> None:
        """Sends the job and notes in ``exchange`` what becomes of it; what fails is noted there as well. ``sent_s`` is
        set to the moment of sending."""
        body = json.dumps(self.endpoint.body(job), ensure_ascii=False).encode()
        exchange.sent_s = self.clock()
        while await self._was_stale(body, exchange):
            exchange.num_resent += 1

    async def _was_stale(self, body: bytes, exchange: Exchange) -> bool:
        """Sends once. True where a kept connection had been closed at the other end, so that nothing came back:
        llama.cpp's server closes them after each stream, though it promises to keep them. That is no failure of the
        request; the next attempt has another connection."""
        connection = _Connection()
        has_begun = False
        try:
            async with self._session.post(
                self.endpoint.target,
                data=body,
                headers={"Content-Type": "application/json"},
                trace_request_ctx=connection,
            ) as response:
                has_begun = True
                if response.status != 200:
                    exchange.failure = await _refusal(response)
                elif response.content_type != "text/event-stream":
                    exchange.failure = await _no_stream(response)
                else:
                    await self._read(response.content, exchange)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            is_timeout = isinstance(error, asyncio.TimeoutError)
            if connection.is_reused and not has_begun and not is_timeout:
                return True
            exchange.failure = _broken(error, has_begun=has_begun)
        return False

    async def _read(self, content: aiohttp.StreamReader, exchange: Exchange) -> None:
        parser = EventParser()
        while piece := await content.readany():
            now_s = self.clock()
            for event in parser.feed(piece):
                note(exchange, event, now_s)
        now_s = self.clock()
        for event in parser.close():
            note(exchange, event, now_s)
        conclude(exchange)


@dataclass
class _Connection:
    """What is known of the connection that a request got."""

    is_reused: bool = False


async def _note_reuse(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.is_reused = True


def note(exchange: Exchange, event: bytes, now_s: float) -> None:
    """Adds an event that arrived at ``now_s`` to the exchange."""
    if event == b"[DONE]":
        exchange.is_complete = True
        return
    try:
        chunk = json.loads(event)
        if error := chunk.get("error"):
            exchange.failure = exchange.failure or Failure("error_event", _said(error))
            return
        _note_usage(exchange, chunk.get("usage"))
        for choice in chunk.get("choices") or ():
            if _has_text(choice):
                exchange.chunk_s.append(now_s)
            if choice.get("finish_reason") is not None:
                exchange.finished_s = now_s
    except (ValueError, TypeError, AttributeError, KeyError):
        shown = event[:_SHOWN_CHARACTERS].decode(errors="replace")
        exchange.failure = exchange.failure or Failure("bad_event", f"not a chunk of OpenAI's API: {shown}")


def conclude(exchange: Exchange) -> None:
    """What the end of the stream means: an answer without a finish reason and without [DONE] was cut off."""
    if exchange.finished_s is not None:
        exchange.is_complete = True
    if exchange.failure is not None:
        return
    if not exchange.is_complete:
        exchange.failure = Failure("cut_off", "the stream ended before the answer did")
    elif exchange.finished_s is None and not exchange.chunk_s:
        exchange.failure = Failure("empty", "the stream had neither text nor a finish reason")


def _note_usage(exchange: Exchange, usage: Mapping[str, Any] | None) -> None:
    if not usage:
        return
    exchange.prompt_tokens = int(usage["prompt_tokens"])
    exchange.reported_tokens = int(usage.get("completion_tokens") or 0)
    exchange.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Whether the chunk carries any of the answer; "reasoning" and "reasoning_content" are names for thoughts."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(part) for part in ("content", "reasoning_content", "reasoning", "tool_calls"))


async def _refusal(response: aiohttp.ClientResponse) -> Failure:
    text = (await response.read()).decode(errors="replace")
    try:
        said = _said(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        said = text[:_SHOWN_CHARACTERS] or str(response.reason)
    return Failure(f"http_{response.status}", said)


async def _no_stream(response: aiohttp.ClientResponse) -> Failure:
    text = (await response.read())[:_SHOWN_CHARACTERS].decode(errors="replace")
    return Failure("not_a_stream", f"{response.content_type} in place of text/event-stream: {text}")


def _said(error: Any) -> str:
    """The message of an error in any of the shapes that servers use."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_SHOWN_CHARACTERS]


def _broken(error: Exception, *, has_begun: bool) -> Failure:
    if isinstance(error, asyncio.TimeoutError):
        return Failure("timeout", "no answer in time")
    kind = "connection_failed" if isinstance(error, aiohttp.ClientConnectorError) else "connection_lost"
    return Failure(kind, str(error) or ("while it answered" if has_begun else "before it answered"))
