"""Serves a model over HTTP with the APIs of OpenAI and of Text Generation Inference."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import (
    DEFAULT_MODEL,
    add_engine_arguments,
    add_executor_arguments,
    add_model_argument,
    byte_size,
    engine_config,
    executor_choice,
)
from paceline.errors import UnsupportedError

if TYPE_CHECKING:
    from paceline.llm import LLM

NAME = "serve"
HELP = "serve a model over HTTP"

MAX_QUEUE = 256
"""Requests that may wait unless told otherwise: who would wait for minutes is better told at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the server and the engine."""
    add_model_argument(parser)
    parser.set_defaults(model=None)
    group = parser.add_argument_group("server")
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add("--config", metavar="FILE", help="TOML file with a model, [server] and [engine]; what is said here goes first")
    add("--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, metavar="N", help="port to listen on (default 8000; 0 takes a free one)")
    add("--served-name", metavar="NAME", help="the model's name in requests (default: MODEL)")
    add("--api-key-file", metavar="FILE", help="one key a line; without it everybody is let in")
    add("--allow-origin", dest="allow_origins", action="append", metavar="ORIGIN", help="web origin that may call")
    add("--max-body", dest="max_body_bytes", type=byte_size, metavar="SIZE", help="longest request body (default 8M)")
    add("--max-prompt-tokens", type=int, metavar="N", help="longest prompt (default: what the context holds)")
    add("--max-choices", type=int, metavar="N", help="largest n (default 16)")
    add("--max-stop", type=int, metavar="N", help="most stop strings (default 16)")
    add("--max-logprobs", type=int, metavar="N", help="most alternatives for a token (default 20)")
    add("--max-connections", type=int, metavar="N", help="connections at a time (default 1024)")
    add("--request-timeout-s", type=float, metavar="S", help="longest that an answer may take (default: any)")
    add(
        "--coalesce-ms",
        type=float,
        metavar="MS",
        help="least time between two chunks of a stream (default 40; 0: none)",
    )
    add("--log-format", choices=("json", "text", "off"), help="the line of a request on standard error (default text)")
    add("--max-stall-s", type=float, metavar="S", help="time without progress from which it is not ready (default 60)")
    add("--metrics-by-client", action="store_true", help="tell the metrics of each key apart")
    add("--otel", action="store_true", help="a span for each request, sent where the OTEL_* variables say")
    add("--send-s", type=float, metavar="S", help="longest that a client may take nothing of its answer (default 60)")
    add("--shutdown-s", type=float, metavar="S", help="time that running answers get after SIGTERM (default 30)")
    add_engine_arguments(parser)
    add_executor_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the server until a signal ends it."""
    from paceline.serve.address import listen
    from paceline.serve.configuration import Configuration, read_configuration
    from paceline.serve.settings import ServeSettings
    from paceline.serve.signals import leave_when_told

    leave_when_told()
    file = read_configuration(args.config, byte_size) if hasattr(args, "config") else Configuration()
    model = args.model or file.model or DEFAULT_MODEL
    given: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(ServeSettings) if hasattr(args, f.name)}
    if "allow_origins" in given:
        given["allow_origins"] = tuple(given["allow_origins"])
    settings = ServeSettings(**{**file.server, **given})
    config = engine_config(args, **{"max_queue": MAX_QUEUE, **file.engine})
    with listen(settings.host, settings.port) as listener:

        def load() -> LLM:
            from paceline.cli.session import open_model

            return open_model(model, config, verbose=args.verbose, **executor_choice(args))[0]

        loading = _in_background(load)
        try:  # while the model loads
            from paceline.serve.run import serve
        except ImportError as error:
            raise UnsupportedError(f"{error}: install it with `pip install paceline[serve]`") from error
        return serve(model, settings, listener, loading)


def _in_background(load: Callable[[], LLM]) -> Future[LLM]:
    """What ``load`` returns, once it has; nobody waits for it at the end of the process."""
    loading: Future[LLM] = Future()

    def work() -> None:
        try:
            loading.set_result(load())
        except BaseException as error:
            loading.set_exception(error)

    threading.Thread(target=work, name="paceline-load", daemon=True).start()
    return loading
