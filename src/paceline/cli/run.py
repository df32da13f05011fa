"""Answers one prompt: the text as it is generated, then a line of figures on standard error."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli.arguments import (
    add_engine_arguments,
    add_executor_arguments,
    add_model_argument,
    add_sampling_arguments,
    engine_config,
    executor_choice,
    sampling_params,
)
from paceline.cli.session import open_model
from paceline.cli.terminal import dim
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.engine.outputs import Completion, Delta, TokenLogprob
    from paceline.llm import LLM
    from paceline.params import SamplingParams

NAME = "run"
HELP = "answer one prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the prompt and its form, output, sampling and engine."""
    add_model_argument(parser)
    parser.add_argument(
        "-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input, where that is no terminal)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="put the prompt into the model's chat template (default where it has one)"
    )
    form.add_argument("--raw", action="store_true", help="give the model the prompt as it is, to be continued")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt, for chat")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the stream")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    add_executor_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the command; Ctrl-C ends the answer and the program."""
    params = sampling_params(args)
    for field in ("logprobs", "prompt_logprobs"):
        if not args.json and getattr(params, field) is not None:
            raise ParameterError(field, getattr(params, field), "printed with --json alone")
    config = engine_config(args)
    prompt = _prompt(args)
    llm, load_s = open_model(args.model, config, verbose=args.verbose, **executor_choice(args))
    with llm:
        messages = _messages(args, llm, prompt)
        if args.json:
            import json

            completion = _complete(llm, prompt, messages, params)
            result = document(args.model, completion, load_s, llm.path())
            print(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))
        else:
            completion = _print_answer(llm, prompt, messages, params)
            print(dim(figures_line(completion, llm.path()), sys.stderr), file=sys.stderr)
    return 0


def document(model: str, completion: Completion, load_s: float, path: dict[str, Any]) -> dict[str, Any]:
    """The answer as plain data for JSON; never a number that JSON does not know."""
    timing = completion.timing
    result = {
        "model": model,
        **_choice(completion),
        "usage": {
            "prompt_tokens": completion.num_prompt_tokens,
            "completion_tokens": sum(choice.num_completion_tokens for choice in completion.choices or (completion,)),
            "cached_tokens": completion.num_cached_tokens,
        },
        "timing": {
            "load_s": load_s,
            "ttft_s": timing.ttft_s,
            "tpot_s": timing.tpot_s,
            "prefill_tokens_per_s": timing.prefill_tokens_per_s,
            "decode_tokens_per_s": timing.decode_tokens_per_s,
        },
        "path": path,
    }
    if completion.speculation is not None:
        result["speculation"] = completion.speculation.document()
    if len(completion.choices) > 1:
        result["choices"] = [_choice(choice) for choice in completion.choices]
    if completion.prompt_logprobs is not None:
        result["prompt_logprobs"] = _logprobs(completion.prompt_logprobs)
    return result


def figures_line(completion: Completion, path: dict[str, Any]) -> str:
    """One line: tokens, those found in the prefix cache, time to the first one, rate, and the path that really ran."""
    timing = completion.timing
    cached = f" ({completion.num_cached_tokens} cached)" if completion.num_cached_tokens else ""
    parts = [
        f"{completion.num_prompt_tokens}{cached} + {completion.num_completion_tokens} tokens",
        f"TTFT {timing.ttft_s * 1e3:.0f} ms",
        path_text(path),
    ]
    if completion.num_completion_tokens > 1:
        parts.insert(2, f"{timing.decode_tokens_per_s:.1f} tok/s")
    drafts = completion.speculation
    if drafts is not None and drafts.accepted:
        parts.append(f"{drafts.accepted} of {drafts.proposed} drafted tokens accepted")
    if completion.finish_reason != "stop":
        parts.append(f"ended by {completion.finish_reason}")
    return " · ".join(parts)


def path_text(path: dict[str, Any]) -> str:
    """The path in words."""
    threads = path.get("threads")
    words = [
        str(path.get("isa")),
        f"{threads} thread" + ("" if threads == 1 else "s"),
        f"{path.get('weights')} weights",
    ]
    words.append(f"{path.get('kv_dtype')} KV")
    if path.get("speculation") not in (None, "none", "off"):
        words.append(f"speculation {path['speculation']}")
    if "speculation_failure" in path:
        words.append(f"a drafter failed ({path['speculation_failure']})")
    return ", ".join(words)


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        prompt = str(args.prompt)
    elif sys.stdin is None or sys.stdin.isatty():
        raise ParameterError("prompt", None, "give one with -p TEXT or on standard input")
    else:
        prompt = sys.stdin.read()
    if not prompt:
        raise ParameterError("prompt", prompt, "a text that is not empty")
    return prompt


def _messages(args: argparse.Namespace, llm: LLM, prompt: str) -> list[dict[str, str]] | None:
    """The conversation to answer, None where the prompt is to be continued as it is."""
    if args.raw or not (args.chat or llm.chat_template is not None):
        if args.system is not None:
            raise ParameterError(
                "system", args.system, "needs a chat: leave out --raw, or use a model with a chat template"
            )
        return None
    system = [] if args.system is None else [{"role": "system", "content": str(args.system)}]
    return [*system, {"role": "user", "content": prompt}]


def _complete(llm: LLM, prompt: str, messages: list[dict[str, str]] | None, params: SamplingParams) -> Completion:
    return llm.generate(prompt, params) if messages is None else llm.chat(messages, params)


def _print_answer(llm: LLM, prompt: str, messages: list[dict[str, str]] | None, params: SamplingParams) -> Completion:
    """Prints the answer, streaming where it is a single one."""
    if params.n > 1:
        completion = _complete(llm, prompt, messages, params)
        for number, choice in enumerate(completion.choices, 1):
            print(f"{dim(f'[{number}]', sys.stdout)} {choice.text}")
        return completion
    stream = llm.stream(prompt, params) if messages is None else llm.chat(messages, params, stream=True)
    return print_stream(stream, [])


def print_stream(stream: Iterator[Delta], said: list[str]) -> Completion:
    """Prints the pieces as they come and returns the completion; an interrupt aborts the request before it goes on.

    Appends each piece of text to ``said``, so that a caller has what was printed before an interrupt.
    """
    completion: Completion | None = None
    try:
        for delta in stream:
            if delta.text:
                said.append(delta.text)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
            completion = delta.completion or completion
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    if not said or not said[-1].endswith("\n"):
        sys.stdout.write("\n")
    assert completion is not None, "the last piece of a stream carries the completion"
    return completion


def _choice(completion: Completion) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        result["logprobs"] = _logprobs(completion.logprobs)
    return result


def _logprobs(entries: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {
            "token_id": entry.token_id,
            "text": entry.text,
            "logprob": _finite(entry.logprob),
            "top": [{"token_id": top.token_id, "text": top.text, "logprob": _finite(top.logprob)} for top in entry.top],
        }
        for entry in entries
    ]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
