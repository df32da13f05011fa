"""The log of a server: a line for each request, and errors with their traces. Never prompts, answers or keys."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from paceline.serve.exchange import Exchange
from paceline.serve.settings import LogFormat
from paceline.serve.watch import Watch

LOGGER = "paceline.serve"
MAX_WAITING = 10_000
"""Lines that wait for a reader of the pipe; what comes then is counted and left out."""
LAST_WORDS_S = 1.0
"""Time that the last lines get at the end."""

PROBES = frozenset({"/metrics", "/stats", "/health", "/health/live", "/health/ready"})
"""Endpoints that machines ask every few seconds: in a terminal they would hide the rest."""

_FIELDS = "paceline_fields"


class RequestLog(Watch):
    """A line when a request has ended."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def ended(self, exchange: Exchange) -> None:
        """Errors of the server are warnings; what machines probe, and went well, is told to machines only."""
        level = logging.WARNING if exchange.status >= 500 else logging.INFO
        if exchange.status == 200 and exchange.endpoint in PROBES:
            level = logging.DEBUG
        self._logger.log(level, _line(exchange), extra={_FIELDS: request_fields(exchange)})


def request_fields(exchange: Exchange) -> dict[str, Any]:
    """What the log says of a request; what does not apply to it is left out."""
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "client": exchange.client.name or None,
        "method": exchange.method[:20],
        "endpoint": exchange.endpoint or None,
        "status": exchange.status,
        "error": exchange.error,
        "e2e_s": exchange.e2e_s,
    }
    if exchange.num_answers:
        tpot_s = exchange.tpot_s
        fields |= {
            "prompt_tokens": exchange.num_prompt_tokens,
            "cached_tokens": exchange.num_cached_tokens,
            "output_tokens": exchange.num_output_tokens,
            "drafted_tokens": exchange.num_drafted,
            "accepted_tokens": exchange.num_accepted,
            "queue_s": exchange.queue_s,
            "ttft_s": exchange.ttft_s,
            "tpot_s": sum(tpot_s) / len(tpot_s) if tpot_s else None,
            "finish_reason": ",".join(sorted(set(exchange.finish_reasons))),
        }
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }


def _line(exchange: Exchange) -> str:
    """For people."""
    parts = [exchange.method[:20], exchange.endpoint or "?", str(exchange.status)]
    if exchange.client.name:
        parts.append(exchange.client.name)
    if exchange.error is not None:
        parts.append(exchange.error)
    if exchange.num_answers:
        cached = f" ({exchange.num_cached_tokens} cached)" if exchange.num_cached_tokens else ""
        parts.append(f"{exchange.num_prompt_tokens}{cached} + {exchange.num_output_tokens} tokens")
    if exchange.ttft_s is not None:
        parts.append(f"ttft {exchange.ttft_s * 1e3:.0f} ms")
    if exchange.e2e_s is not None:
        parts.append(f"total {exchange.e2e_s * 1e3:.0f} ms")
    return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, then the fields of a request, or a message and perhaps a trace."""

    def format(self, record: logging.LogRecord) -> str:
        """Without a line break, whatever the record holds."""
        document: dict[str, Any] = {
            "time": _utc(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        fields = getattr(record, _FIELDS, None)
        document |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info is not None and record.exc_info[0] is not None:
            document["error"] = record.exc_info[0].__name__
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document)


class TextFormatter(logging.Formatter):
    """A record as a short line for a terminal; a trace follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Control characters that somebody sent are shown escaped: they could rewrite the screen."""
        message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.getMessage())
        mark = f" {record.levelname}" if record.levelno >= logging.WARNING else ""
        line = f"{_utc(record):%H:%M:%S}{mark} {message}"
        if record.exc_info is not None and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _utc(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, timezone.utc)


class PipeHandler(logging.Handler):
    """Writes lines to a file descriptor in a thread of its own. Who logs never waits: a pipe that nobody reads costs
    lines, and how many is said once it is read again."""

    def __init__(self, descriptor: int, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(max_waiting)
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write, name="paceline-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the line, or counts it as lost."""
        try:
            if self._num_lost:
                lost = logging.LogRecord(LOGGER, logging.WARNING, "", 0, f"{self._num_lost} lines lost", None, None)
                self._lines.put_nowait((self.format(lost) + "\n").encode("utf-8", "replace"))
                self._num_lost = 0
            self._lines.put_nowait((self.format(record) + "\n").encode("utf-8", "replace"))
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Waits a moment for what is queued to be written."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=LAST_WORDS_S)
            self._thread.join(LAST_WORDS_S)
        super().close()

    def _write(self) -> None:
        # Not through sys.stderr: a thread that is stuck in there when the interpreter ends would hold its lock.
        while (line := self._lines.get()) is not None:
            while line:
                try:
                    line = line[os.write(self._descriptor, line) :]
                except BlockingIOError:  # somebody who shares it made it so
                    select.select([], [self._descriptor], [])
                except OSError:  # the reader is gone for good, and there is nowhere left to say so
                    return


@contextlib.contextmanager
def logging_to(descriptor: int, log_format: LogFormat) -> Iterator[logging.Logger]:
    """The server's logger, which writes there while this lasts. Errors are told whatever the format."""
    logger = logging.getLogger(LOGGER)
    before = logger.level, logger.propagate
    handler = PipeHandler(descriptor)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if log_format == "json" else logging.INFO)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]
