"""Measures this machine: decode, prefill, batch, prefix, chat, reload, gap, verify-cost, speculate; each figure comes
with the machine's limit. And serve: a server, wherever it runs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import bench_serve
from paceline.cli.arguments import add_engine_arguments, add_model_argument, engine_config, positive
from paceline.cli.run import path_text
from paceline.cli.session import fetch_model, open_model
from paceline.cli.terminal import Progress, bold, dim, table
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.llm import LLM
    from paceline.measure.record import Measurement
    from paceline.measure.roofline import Traffic

NAME = "bench"
HELP = "measure decode, prefill, batch, prefix, chat, reload, gap, verify-cost, speculate, or a server"

UNITS = {
    "_tokens_per_s": ("tok/s", 1),
    "_ms": ("ms", 1),
    "_speedup": ("times faster", 2),
    "_share": ("of a cold one", 3),
}
"""How a metric's name ends -> its unit in words, and the digits that are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command a workload."""
    workloads = parser.add_subparsers(dest="workload", metavar="WORKLOAD", required=True, parser_class=type(parser))
    decode = _workload(workloads, "decode", "tokens a second of one request while it generates", runs=5)
    start = decode.add_mutually_exclusive_group()
    _count(start, "--prompt-tokens", 64, "tokens in the prompt")
    _count(decode, "--new-tokens", 256, "tokens generated")
    start.add_argument(
        "--depth", type=positive, metavar="N", help="tokens in the cache before it starts, instead of --prompt-tokens"
    )
    prefill = _workload(workloads, "prefill", "prompt tokens a second until the first token", runs=5)
    _count(prefill, "--prompt-tokens", 1024, "tokens in the prompt")
    batch = _workload(workloads, "batch", "output tokens a second of many requests", runs=5)
    _count(batch, "--requests", 64, "requests")
    _count(batch, "--concurrency", 32, "requests that run at a time")
    _count(batch, "--prompt-tokens", 128, "tokens in each prompt")
    _count(batch, "--new-tokens", 128, "tokens of each answer")
    prefix = _workload(workloads, "prefix", "what the prefix cache gains when prompts begin alike", runs=3)
    _count(prefix, "--requests", 32, "requests")
    _count(prefix, "--concurrency", 8, "requests that run at a time")
    _count(prefix, "--prefix-tokens", 1024, "tokens that all prompts begin with")
    _count(prefix, "--tail-tokens", 32, "tokens of each prompt after them")
    _count(prefix, "--new-tokens", 32, "tokens of each answer")
    chat = _workload(workloads, "chat", "the time to the first token, turn by turn", runs=3)
    _count(chat, "--turns", 10, "turns")
    _count(chat, "--new-tokens", 48, "tokens of each answer")
    reload = _workload(
        workloads, "reload", "the time to the first token when the prompt is on disk", runs=3, warm_up=False
    )
    _count(reload, "--prompt-tokens", 2048, "tokens in the prompt")
    gap = _workload(workloads, "gap", "how long an answer pauses while a prompt is read", runs=1, warm_up=False)
    _count(gap, "--prompt-tokens", 8000, "tokens in the prompt that is read")
    verify = _workload(workloads, "verify-cost", "the cost of a pass over 1 to 64 tokens, relative to one", runs=15)
    _count(verify, "--depth", 64, "tokens in the cache")
    _count(verify, "--max-rows", 64, "largest pass")

    speculate = _workload(workloads, "speculate", "what drafts gain, by category of prompts", runs=1, warm_up=False)
    speculate.add_argument(
        "--data", type=Path, metavar="FILE", help='JSON lines with "category" and "turns" (default: a few prompts)'
    )
    _count(speculate, "--per-category", 1000, "conversations of each category, at most")
    _count(speculate, "--new-tokens", 256, "tokens of each answer, at most")
    _count(speculate, "--concurrency", 1, "requests that run at a time")
    speculate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the draws (default 0)")
    bench_serve.add_workload(workloads)


def execute(args: argparse.Namespace) -> int:
    """Measures, prints, and appends to the record where one was asked for."""
    if args.workload == "serve":
        return bench_serve.execute(args)
    measurement = {
        "decode": _decode,
        "prefill": _prefill,
        "batch": _batch,
        "prefix": _prefix,
        "chat": _chat,
        "reload": _reload,
        "gap": _gap,
        "verify-cost": _verify_cost,
        "speculate": _speculate,
    }[args.workload](args)
    document = measurement.document()
    if args.record is not None:
        from paceline.measure.record import write_record

        write_record(args.record, args.model, document)
    if args.json:
        import json

        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print("\n".join(summary(document)))
    return 0


def summary(document: Mapping[str, Any]) -> list[str]:
    """The figures for a person."""
    limit = document["limit"]
    unit, digits = next(shown for ending, shown in UNITS.items() if document["metric"].endswith(ending))
    lines = [
        f"{bold(document['metric'], sys.stdout)}  {document['median']:,.{digits}f} {unit}"
        f"  ({document['min']:,.{digits}f} to {document['max']:,.{digits}f} in {len(document['runs'])} "
        f"{'categories' if 'categories' in document else 'runs'})",
        f"limit here      {limit['limit_tokens_per_s']:,.0f} tok/s, of which {limit['fraction']:.0%} is reached: "
        f"{limit['bytes_per_token'] / 1e6:,.1f} MB a token at {limit['bandwidth_gb_s']:.1f} GB/s, "
        f"int8 peak {limit['int8_gops']:,.0f} GOPS",
    ]
    explain = {
        "prefix_speedup": _prefix_lines,
        "chat_ttft_share": _chat_lines,
        "reload_speedup": _reload_lines,
        "gap_p99_ms": _gap_lines,
        "speculation_speedup": _speculate_lines,
    }
    if document["metric"] in explain:
        lines += explain[document["metric"]](document)
    if relative := document.get("relative"):
        shown = ("1", "2", "4", "8", "16", "32", "64")
        lines.append("C(n)            " + "   ".join(f"{n}: {relative[n]:.2f}" for n in shown if n in relative))
    return [*lines, dim(path_text(document["path"]), sys.stdout)]


def _prefix_lines(document: Mapping[str, Any]) -> list[str]:
    return [
        f"with the cache  {document['with_s']:.2f} s, without {document['without_s']:.2f} s; "
        f"{document['saved_tokens']:,} of {document['query_tokens']:,} prompt tokens not computed, same tokens out"
    ]


def _chat_lines(document: Mapping[str, Any]) -> list[str]:
    turns = "  ".join(f"{1e3 * ttft_s:.0f}" for ttft_s in document["ttft_s"])
    cached, tokens = document["cached_tokens"][-1], document["prompt_tokens"][-1]
    return [
        f"first token     {turns} ms by turn; in a cold cache {1e3 * document['cold_ttft_s']:.0f} ms for the last one",
        f"cached          {cached:,} of the last turn's {tokens:,} tokens",
    ]


def _reload_lines(document: Mapping[str, Any]) -> list[str]:
    return [
        f"first token     {1e3 * document['reload_s']:.0f} ms with the pages on disk, "
        f"{1e3 * document['prefill_s']:.0f} ms without",
        f"cached          {document['cached_tokens']:,} of {document['prompt_tokens']:,} tokens, same token out",
    ]


def _gap_lines(document: Mapping[str, Any]) -> list[str]:
    def line(name: str, figures: Mapping[str, Any]) -> str:
        gaps = ", ".join(f"{at} {gap_ms:.0f}" for at, gap_ms in figures["gap_ms"].items())
        return (
            f"{name:<16}{gaps} ms (alone {figures['alone_gap_ms']:.0f}) while {document['prompt_tokens']:,} tokens are "
            f"read in {figures['prefill_s']:.1f} s, {figures['chunk_tokens']:.0f} a step"
        )

    return [line(f"bound {document['max_gap_ms']:g} ms", document), line("no bound", document["unbounded"])]


def _speculate_lines(document: Mapping[str, Any]) -> list[str]:
    from paceline.measure.speculation import category_rows

    header, *rows = category_rows(document)
    lines = table(header, rows, right=frozenset(range(1, 6)))
    return [*lines, f"mean over categories: {document['mean_speedup']:.2f} times faster"]


def _count(parser: Any, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{text} (default {default})")


def _workload(workloads: Any, name: str, text: str, *, runs: int, warm_up: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = workloads.add_parser(name, help=text, description=f"Measures {text}.")
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    _count(parser, "--runs", runs, "runs after a warm-up" if warm_up else "runs")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="append the figures, machine and commit to FILE, one JSON document a line",
    )
    add_engine_arguments(parser)
    return parser


def _decode(args: argparse.Namespace) -> Measurement:
    from paceline.measure.load import measure_decode

    sizes = {"num_prompt": args.depth or args.prompt_tokens, "num_new": args.new_tokens}
    return _on_one_engine(args, _plain_config(args), "Decoding", measure_decode, sizes)


def _prefill(args: argparse.Namespace) -> Measurement:
    from paceline.measure.load import measure_prefill

    return _on_one_engine(args, _plain_config(args), "Prefilling", measure_prefill, {"num_prompt": args.prompt_tokens})


def _batch(args: argparse.Namespace) -> Measurement:
    from paceline.measure.load import measure_batch

    sizes = {"num_requests": args.requests, "num_prompt": args.prompt_tokens, "num_new": args.new_tokens}
    return _on_one_engine(args, _concurrent(args), "Batches", measure_batch, sizes)


def _prefix(args: argparse.Namespace) -> Measurement:
    from paceline.measure.prefix import measure_prefix

    sizes = {
        "num_requests": args.requests,
        "num_prefix": args.prefix_tokens,
        "num_tail": args.tail_tokens,
        "num_new": args.new_tokens,
    }
    return _on_one_engine(args, _concurrent(args), "With and without", measure_prefix, sizes)


def _chat(args: argparse.Namespace) -> Measurement:
    from paceline.measure.prefix import measure_chat

    sizes = {"num_turns": args.turns, "num_new": args.new_tokens}
    return _on_one_engine(args, _plain_config(args), "Chats", measure_chat, sizes)


def _on_one_engine(
    args: argparse.Namespace,
    config: EngineConfig,
    title: str,
    measure: Callable[..., Measurement],
    sizes: Mapping[str, int],
) -> Measurement:
    """What ``measure`` finds on one engine, with its workload's ``sizes``, after a warm-up."""
    llm, _ = open_model(args.model, config, verbose=args.verbose)
    with llm, Progress(title, args.runs + 1) as progress:
        traffic = _traffic(args.model, llm.config)
        return measure(llm, traffic, **sizes, num_runs=args.runs, report=progress.update)


def _reload(args: argparse.Namespace) -> Measurement:
    from paceline.measure.reload import measure_reload

    if hasattr(args, "kv_dir"):
        allowed = "each run has a new directory in the temporary one (TMPDIR); leave --kv-dir out"
        raise ParameterError("kv_dir", args.kv_dir, allowed)
    config = _plain_config(args)

    def open_in(directory: Path) -> LLM:
        return open_model(args.model, dataclasses.replace(config, kv_dir=str(directory)), verbose=args.verbose)[0]

    with Progress("Before and after a restart", args.runs) as progress:
        return measure_reload(
            open_in,
            _traffic(args.model, config),
            num_prompt=args.prompt_tokens,
            num_runs=args.runs,
            report=progress.update,
        )


def _gap(args: argparse.Namespace) -> Measurement:
    from paceline.measure.gap import measure_gap

    config = _plain_config(args)
    assert config.max_gap_ms is not None, "the flag takes numbers only, and there is a default"

    def open_bounded(max_gap_ms: float | None) -> LLM:
        return open_model(args.model, dataclasses.replace(config, max_gap_ms=max_gap_ms), verbose=args.verbose)[0]

    with Progress("With and without a bound", 2 * args.runs) as progress:
        return measure_gap(
            open_bounded,
            _traffic(args.model, config),
            max_gap_ms=config.max_gap_ms,
            num_prompt=args.prompt_tokens,
            num_runs=args.runs,
            report=progress.update,
        )


def _plain_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration, without drafts unless they are asked for: what is measured is what is named."""
    return engine_config(args, speculate="off")


def _concurrent(args: argparse.Namespace, *, speculate: str = "off") -> EngineConfig:
    """The configuration, with ``--concurrency`` as the size of the batch."""
    if hasattr(args, "max_batch"):
        raise ParameterError(
            "max_batch", args.max_batch, "--concurrency sets it in this benchmark; leave --max-batch out"
        )
    config = engine_config(args, speculate=speculate)
    if not hasattr(args, "token_budget"):
        config = dataclasses.replace(config, token_budget=max(config.token_budget, args.concurrency))
    return dataclasses.replace(config, max_batch=args.concurrency)


def _verify_cost(args: argparse.Namespace) -> Measurement:
    from paceline.measure.prompts import prompt_tokens
    from paceline.measure.roofline import model_traffic
    from paceline.measure.verify_cost import load_executor, measure_verify_cost
    from paceline.text.tokenizer import load_tokenizer
    from paceline.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(fetch_model(args.model))
    config = _plain_config(args)
    with Progress(f"Loading {args.model}"):
        executor = load_executor(checkpoint, config, depth=args.depth, max_rows=args.max_rows)
        prompt = prompt_tokens(load_tokenizer(checkpoint), args.depth + args.max_rows)
    with Progress("Passes", args.runs + 1) as progress:
        return measure_verify_cost(
            executor,
            model_traffic(checkpoint, config),
            prompt,
            depth=args.depth,
            max_rows=args.max_rows,
            num_runs=args.runs,
            report=progress.update,
        )


def _speculate(args: argparse.Namespace) -> Measurement:
    from paceline.measure.speculation import BUILT_IN, measure_speculation, read_conversations

    conversations = BUILT_IN if args.data is None else read_conversations(args.data, per_category=args.per_category)
    config = _concurrent(args, speculate="auto")
    llm, _ = open_model(args.model, config, verbose=args.verbose)
    with llm, Progress("With and without drafts") as progress:
        return measure_speculation(
            llm,
            _traffic(args.model, llm.config),
            conversations,
            num_new=args.new_tokens,
            temperature=args.temperature,
            concurrency=args.concurrency,
            num_runs=args.runs,
            report=progress.update,
        )


def _traffic(model: str, config: EngineConfig) -> Traffic:
    from paceline.measure.roofline import model_traffic
    from paceline.weights.checkpoint import open_checkpoint

    return model_traffic(open_checkpoint(fetch_model(model)), config)
