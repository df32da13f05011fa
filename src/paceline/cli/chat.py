"""A conversation in the terminal. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help lists the commands."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.cli.arguments import (
    add_engine_arguments,
    add_executor_arguments,
    add_model_argument,
    add_sampling_arguments,
    engine_config,
    executor_choice,
    sampling_params,
)
from paceline.cli.run import figures_line, path_text, print_stream
from paceline.cli.session import open_model
from paceline.cli.terminal import bold, dim, is_terminal
from paceline.errors import ContextLengthError, PacelineError, ParameterError, UnsupportedError

if TYPE_CHECKING:
    from paceline.engine.outputs import Completion
    from paceline.llm import LLM
    from paceline.params import SamplingParams

NAME = "chat"
HELP = "talk with a model"

COMMANDS = {
    "/clear": "forget the conversation and start anew",
    "/undo": "take back your last message and its answer",
    "/help": "this list",
    "/exit": "leave (so does Ctrl-D)",
}

_HOW_TO_SHORTEN = "/undo takes back the last exchange, /clear starts anew."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, a system message, sampling and engine."""
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    add_executor_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the command until the person leaves."""
    params = sampling_params(args)
    for field in ("n", "logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value not in (None, 1):
            raise ParameterError(
                field, value, "a chat has one answer and prints no log-probabilities; use `paceline run --json`"
            )
    llm, _ = open_model(args.model, engine_config(args), verbose=args.verbose, **executor_choice(args))
    with llm:
        if llm.chat_template is None:
            raise UnsupportedError(f"{args.model} has no chat template: use `paceline run --raw`")
        print(bold(f"{args.model}", sys.stdout) + dim(f" · {path_text(llm.path())}", sys.stdout))
        print(dim("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.", sys.stdout))
        Conversation(llm, params, system=args.system).run(_line_reader())
    return 0


class Conversation:
    """The messages so far, and the loop that reads a line and answers it."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._system)

    def run(self, read: Callable[[], str]) -> None:
        """Answers lines until ``read`` raises ``EOFError`` or the person leaves."""
        while True:
            try:
                line = read().strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print(dim("\nCtrl-D or /exit leaves.", sys.stdout))
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.answer(line)

    def answer(self, text: str) -> None:
        """Adds the message and the answer that it prints. A message that cannot be answered is not kept; a stopped
        answer is."""
        self.messages.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            completion = print_stream(self._llm.chat(self.messages, self._params, stream=True), said)
        except KeyboardInterrupt:
            print(dim("\n[stopped]", sys.stdout))
        except ContextLengthError as error:
            print(
                f"The conversation no longer fits: with this message it has {error.num_prompt_tokens} tokens and the "
                f"context holds {error.context_length}. Nothing was dropped. {_HOW_TO_SHORTEN}"
            )
        except PacelineError as error:
            print(f"error: {error}")
        else:
            self._remark(completion)
        if said:
            self.messages.append({"role": "assistant", "content": "".join(said)})
        else:
            self.messages.pop()

    def _remark(self, completion: Completion) -> None:
        num_tokens = completion.num_prompt_tokens + completion.num_completion_tokens
        if completion.finish_reason == "length" and completion.num_completion_tokens != self._params.max_tokens:
            print(f"The context is full ({num_tokens} tokens), so the answer was cut. {_HOW_TO_SHORTEN}")
        print(dim(figures_line(completion, self._llm.path()), sys.stdout))

    def _command(self, line: str) -> None:
        if line == "/clear":
            self.messages = list(self._system)
            print(dim("A new conversation.", sys.stdout))
        elif line == "/undo":
            taken = self._undo()
            print(dim("Taken back." if taken else "There is nothing to take back.", sys.stdout))
        elif line == "/help":
            width = max(map(len, COMMANDS))
            print("\n".join(f"  {name.ljust(width)}  {what}" for name, what in COMMANDS.items()))
        else:
            print(f"There is no command {line.split()[0]}; /help lists them.")

    def _undo(self) -> bool:
        if len(self.messages) == len(self._system):
            return False
        del self.messages[-2:]
        return True


def _line_reader() -> Callable[[], str]:
    """Reads a line with editing and history at a terminal, plainly elsewhere."""
    if not (sys.stdin.isatty() and is_terminal(sys.stdout)):
        return input
    with contextlib.suppress(ImportError):  # not everywhere
        import readline  # noqa: F401 - importing it gives input() editing and history
    # \x01 and \x02 tell readline which bytes take no room on the screen.
    prompt = re.sub("(\x1b.*?m)", "\x01\\1\x02", bold(">", sys.stdout))
    return lambda: input(f"\n{prompt} ")
