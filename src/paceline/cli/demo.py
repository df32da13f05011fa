"""Shows the engine: answers a prompt, then climbs the ladder, one row a technique. Takes less than a minute."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from typing import TYPE_CHECKING

from paceline.cli.arguments import add_engine_arguments, add_model_argument, engine_config, positive
from paceline.cli.run import figures_line, path_text, print_stream
from paceline.cli.session import open_model
from paceline.cli.terminal import Progress, bold, dim, table

if TYPE_CHECKING:
    from paceline.config import KVFormat
    from paceline.llm import LLM
    from paceline.measure.ladder import Rung

NAME = "demo"
HELP = "watch an answer and what each technique gains"

REMARK = (
    "Rates are output tokens over the whole time, the prompt's included. From the long text on, the rows answer the\n"
    "prompt behind that text, and are so many times faster than the first of them."
)

PROMPT = "Explain in a few sentences why the sky is blue and sunsets are red."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, the prompt, the length, the engine."""
    add_model_argument(parser)
    parser.add_argument("-p", "--prompt", default=PROMPT, metavar="TEXT", help="what is answered")
    parser.add_argument(
        "--new-tokens", type=positive, metavar="N", help="tokens of each row (default: 96, fewer on a slow machine)"
    )
    add_engine_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Answers, then measures."""
    from paceline.measure.ladder import TECHNIQUES, climb_ladder
    from paceline.params import SamplingParams

    llm, load_s = open_model(args.model, engine_config(args), verbose=args.verbose)
    with llm:
        print(bold(args.model, sys.stdout) + dim(f" · {path_text(llm.path())} · loaded in {load_s:.2f} s", sys.stdout))
        print(dim(llm.memory_table(), sys.stdout))
        print(f"\n{bold('> ' + args.prompt, sys.stdout)}\n")
        if llm.chat_template is None:
            prompt = llm.tokenizer.encode(args.prompt)
        else:
            prompt = llm.chat_tokens([{"role": "user", "content": args.prompt}])
        completion = print_stream(llm.stream(prompt, SamplingParams(max_tokens=160)), [])
        print(dim(figures_line(completion, llm.path()), sys.stdout))

        num_new = args.new_tokens or ladder_tokens(completion.timing.decode_tokens_per_s)
        print(bold(f"\nThe ladder: the same prompt, {num_new} tokens, one technique more each row\n", sys.stdout))
        rows = []
        with Progress("Climbing", len(TECHNIQUES)) as progress:
            for rung in climb_ladder(llm, prompt, num_new, open_llm=partial(_open_llm, args)):
                rows.append(
                    (rung.technique.name, f"{rung.tokens_per_s:,.1f}", f"{rung.times_faster:.1f}×", equality(rung))
                )
                progress.update(len(rows))
        header = ("technique", "tok/s", "times faster", "tokens equal the row above")
        print("\n".join(table(header, rows, right=frozenset({1, 2}))))
        print(dim(REMARK, sys.stdout))
    return 0


def equality(rung: Rung) -> str:
    """How a row's tokens compare with those above: "NO" where they had to be equal."""
    if rung.equal is None:
        return ""
    if rung.equal:
        return "yes"
    return "NO" if rung.technique.exact else f"first {rung.num_equal} of {rung.num_compared}, by rounding"


def ladder_tokens(decode_tokens_per_s: float) -> int:
    """Tokens of each row: what one request generates in two seconds, since the whole demo must stay below a minute."""
    return max(16, min(96, int(2 * decode_tokens_per_s)))


def _open_llm(args: argparse.Namespace, kv_dtype: KVFormat) -> LLM:
    from paceline.llm import LLM

    return LLM(args.model, config=dataclasses.replace(engine_config(args), kv_dtype=kv_dtype))
