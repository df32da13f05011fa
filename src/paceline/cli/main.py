"""The command `paceline`: parses the line, runs one command, turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, TextIO

from paceline.errors import PacelineError, ParameterError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

COMMANDS = ("run", "chat", "serve", "bench", "eval", "quantize", "verify", "demo", "models", "pull")
"""Each is a module of this package with ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``execute(args) -> exit
status``; none imports the engine at its top."""


class OneLineParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that answers a wrong command line with one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Prints the version; looks it up only when asked."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and leave")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from paceline import __version__

        print(f"paceline {__version__}")
        parser.exit()


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of the command line, for those commands."""
    parser = OneLineParser(
        prog="paceline",
        description="Runs large language models on your own processor, and measures what each technique gains.",
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=OneLineParser)
    for name in commands:
        module = import_module(f"paceline.cli.{name}")
        command = subparsers.add_parser(module.NAME, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 failed, 2 wrong usage or an impossible parameter, 130
    interrupted."""
    # A stream that the caller closed is None.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_print(stream)
    line = sys.argv[1:] if arguments is None else arguments
    try:
        # Only what runs is imported: the first token must not wait for the benchmarks.
        args = build_parser(line[:1] if line and line[0] in COMMANDS else COMMANDS).parse_args(line)
        status: int = args.execute(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python flushes stdout once more on exit, which must find an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (PacelineError, OSError) as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ParameterError) else EXIT_FAILED
    return status


def _never_fail_to_print(stream: TextIO) -> None:
    """A terminal that is not UTF-8 shows question marks instead of ending the program."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
