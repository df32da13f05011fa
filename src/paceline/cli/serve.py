"""Serves a model over HTTP with the APIs of OpenAI and of Text Generation Inference."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from typing import Any

from paceline.cli.arguments import add_engine_arguments, add_model_argument, byte_size, engine_config
from paceline.errors import UnsupportedError

NAME = "serve"
HELP = "serve a model over HTTP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the server and the engine."""
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add("--host", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, metavar="N", help="port to listen on (default 8000)")
    add("--served-name", metavar="NAME", help="the model's name in requests (default: MODEL)")
    add("--api-key-file", metavar="FILE", help="one key a line; without it everybody is let in")
    add("--allow-origin", dest="allow_origins", action="append", metavar="ORIGIN", help="web origin that may call")
    add("--max-body", dest="max_body_bytes", type=byte_size, metavar="SIZE", help="longest request body (default 8M)")
    add("--max-prompt-tokens", type=int, metavar="N", help="longest prompt (default: what the context holds)")
    add("--max-choices", type=int, metavar="N", help="largest n (default 16)")
    add("--max-connections", type=int, metavar="N", help="connections at a time (default 1024)")
    add("--request-timeout-s", type=float, metavar="S", help="longest that an answer may take (default: any)")
    add("--shutdown-s", type=float, metavar="S", help="time that running answers get after SIGTERM (default 30)")
    add_engine_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the server until a signal ends it."""
    from paceline.serve.settings import ServeSettings

    given: dict[str, Any] = {f.name: getattr(args, f.name) for f in fields(ServeSettings) if hasattr(args, f.name)}
    if "allow_origins" in given:
        given["allow_origins"] = tuple(given["allow_origins"])
    settings = ServeSettings(**given)
    config = engine_config(args)
    try:
        from paceline.serve.run import serve
    except ImportError as error:
        raise UnsupportedError(f"{error}: install what the server needs with `pip install paceline[serve]`") from error
    from paceline.cli.session import open_model

    return serve(args.model, settings, lambda: open_model(args.model, config, verbose=args.verbose)[0])
